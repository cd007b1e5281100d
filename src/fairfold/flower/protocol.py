"""What both sides of the network agree on. Nothing heavy is imported here."""

import re
import secrets

VERSION = 5  # raised whenever a message changes its meaning; both sides refuse any other

# Types of messages.
CAPACITY = "query.capacity"  # asks a device what it can hold, and who it is
SURVEY = "query.survey"  # asks a device for its part of the sums before the first round, of some items
NUMBERING = "query.numbering"  # tells a device the numbers which some items have in this run
MODEL = "query.model"  # gives a device the final model of its size, as the file that it keeps

# Their records.
ARRAYS = "arrays"  # the tensors: those a device receives, or what it answers with
CODED = "coded"  # those that are sent as they are stored, in few bits
FILE = "file"  # in the arrays of a message that gives a model: the bytes of a file
FACTS = "fairfold"  # all else: version, round, words, weight

WINDOW = 1 << 18  # items that a survey or a numbering is about at a time: all that a device holds of the catalogue
DIGITS = re.compile(r"[0-9a-f]{1,16}")  # how the numbers of words, runs and devices are written


def new_word() -> int:
    """A number that no other word, run or device has."""
    return 1 + secrets.randbelow(2**63 - 1)
