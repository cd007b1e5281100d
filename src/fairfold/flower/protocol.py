"""Constants that server and clients share: message types and record names. Imports neither torch nor Flower."""

import re
import secrets

VERSION = 10  # raised whenever a message changes its meaning; both sides refuse any other

# Types of messages.
CAPACITY = "query.capacity"  # asks a client for its capacity and its id
STATISTICS = "query.statistics"  # asks a client for its statistics of some items, before the first round
NUMBERING = "query.numbering"  # gives a client the numbers that some items have in this run
# Phases of secure aggregation. The masked vector itself is the reply to a task or to a request for statistics.
KEYS = "query.secure_keys"  # asks a client for its public keys
SHARES = "query.secure_shares"  # names the cohort, and asks for shares of the client's secrets
SIGN = "query.secure_sign"  # names the survivors, and asks for a signature of that list
REVEAL = "query.secure_reveal"  # has the signatures, and asks for the shares that unmask the sum
MODEL = "query.model"  # gives a client the final model of its size, as a file to store
ROWS = "query.rows"  # has a block of the full table's rows pass by a client, which keeps sums of its histories

# Records of messages.
ARRAYS = "arrays"  # tensors
CODED = "coded"  # tensors that travel as they are stored, in few bits
FILE = "file"  # in the arrays of a message that gives a model: the bytes of a file
FACTS = "fairfold"  # all else: version, round, ids, weight
SECURE = "secure"  # in the facts: a message of secure aggregation; as a record: a masked vector

WINDOW = 1 << 18  # items per request for statistics and per numbering: all that a client holds of the catalogue
HEX_ID = re.compile(r"[0-9a-f]{1,16}")  # ids of updates, runs and clients, as they are written


def new_id() -> int:
    """Draw a random 63-bit id for an update, a run or a client; never 0."""
    return 1 + secrets.randbelow(2**63 - 1)
