"""Test vectors of the protocol between server and devices, and the program that makes them."""
