"""What both sides of the network agree on. Nothing heavy is imported here."""

import re
import secrets

VERSION = 8  # raised whenever a message changes its meaning; both sides refuse any other

# Types of messages.
CAPACITY = "query.capacity"  # asks a device what it can hold, and who it is
SURVEY = "query.survey"  # asks a device for its part of the sums before the first round, of some items
NUMBERING = "query.numbering"  # tells a device the numbers which some items have in this run
# The phases of a secure sum but for the vector, which goes with the answer to an order or to a survey.
KEYS = "query.secure_keys"  # asks a device for its keys of a sum
SHARES = "query.secure_shares"  # names the cohort, and asks for shares of the device's secrets
SIGN = "query.secure_sign"  # names the survivors, and asks for a signature of that
REVEAL = "query.secure_reveal"  # has the signatures, and asks for the shares that unmask the sum
MODEL = "query.model"  # gives a device the final model of its size, as the file that it keeps

# Their records.
ARRAYS = "arrays"  # the tensors: those a device receives, or what it answers with
CODED = "coded"  # those that are sent as they are stored, in few bits
FILE = "file"  # in the arrays of a message that gives a model: the bytes of a file
FACTS = "fairfold"  # all else: version, round, words, weight
SECURE = "secure"  # in the facts: a message of a secure sum; as a record: a vector under its masks

WINDOW = 1 << 18  # items that a survey or a numbering is about at a time: all that a device holds of the catalogue
DIGITS = re.compile(r"[0-9a-f]{1,16}")  # how the numbers of words, runs and devices are written


def new_word() -> int:
    """A number that no other word, run or device has."""
    return 1 + secrets.randbelow(2**63 - 1)
