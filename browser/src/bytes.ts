// Bytes: joining, hexadecimal digits, base64, hashes.

export type Bytes = Uint8Array<ArrayBuffer>;
const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export const utf8 = (text: string): Bytes => encoder.encode(text) as Bytes;
export const text = (bytes: Uint8Array): string => decoder.decode(bytes);

export function join(...parts: Uint8Array[]): Bytes {
  const joined = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    joined.set(part, at);
    at += part.length;
  }
  return joined;
}

export const hex = (bytes: Uint8Array): string => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
export const unhex = (digits: string): Bytes => Uint8Array.from(digits.match(/../g) ?? [], (two) => parseInt(two, 16));

export function base64(bytes: Uint8Array): string {
  let letters = "";
  for (const byte of bytes) letters += String.fromCharCode(byte);
  return btoa(letters);
}

export const unbase64 = (digits: string): Bytes => Uint8Array.from(atob(digits), (letter) => letter.charCodeAt(0));

export async function sha256(bytes: Bytes): Promise<Bytes> {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
}

export const equal = (one: Uint8Array, other: Uint8Array): boolean =>
  one.length === other.length && one.every((byte, place) => byte === other[place]);

// The memory of a typed array as bytes, without a copy.
export const bytesOf = (numbers: ArrayBufferView): Bytes =>
  new Uint8Array(numbers.buffer as ArrayBuffer, numbers.byteOffset, numbers.byteLength);

export const random = (size: number): Bytes => crypto.getRandomValues(new Uint8Array(size));

// An error for a person or a server: what was given, what was needed, what to do.
export class Refusal extends Error {
  constructor(
    readonly kind: string,
    readonly given: string,
    readonly needed: string,
    readonly remedy = "",
  ) {
    super(`${given}; needed: ${needed}.${remedy && " " + remedy}`);
    this.name = kind;
  }
}

export const invalid = (given: string, needed = "what docs/protocol.md says"): Refusal =>
  new Refusal("InvalidMessage", given, needed, "Both sides must run the same fairfold.");
