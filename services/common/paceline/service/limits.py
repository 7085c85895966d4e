"""What callers and peers can use at most: the one table of limits that no option sets.

Sampling parameters have theirs in :mod:`paceline.sampling`, options theirs where they are defined.
Imports nothing of the project.
"""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Messages. A longer one is refused before it is parsed.
MESSAGE_BYTES = MIB  # longest request of a method that is not listed by its service
FRAME_BYTES = 4 * MIB  # longest message of a drafter service to a verifier
VERIFIER_FRAME_BYTES = 64 * MIB
"""Longest message of a verifier to a drafter service that has joined it: texts of generations."""
TOKEN_BYTES = 5  # largest size of a token id in a message
UNCOUNTED_BYTES = 64 * KIB  # in a longer message the fields are counted before it is parsed
MESSAGE_FIELDS = 1 << 16
"""Most fields of a message and those within it; an array is one. A message within it takes two
bytes there if it is empty, and hundreds in memory."""

# What waits for a peer that does not read, which is then disconnected.
UNSENT_BYTES = 256 * MIB
UNSENT_MESSAGES = 4096

# Connections.
HANDSHAKES = 64
"""Connections to the Unix socket that have not shown their token. The oldest makes room."""
HANDSHAKE_SECONDS = 2.0  # longest time for it
CONNECTIONS = 1024
"""Connections of callers to a server, or an eighth of the files that it may open. Beyond it those
without a call make room, then those that were not used for the longest time; beyond a quarter of
the files new ones are refused."""
CONNECTIONS_SECONDS = 0.5  # time between two looks at them
TRANSPORT_SECONDS = 10  # longest time for the handshakes of TLS and HTTP/2
JOIN_SECONDS = 10.0
"""Longest time between the answer to a Join call and the use of the socket or the stream."""
JOINED_SERVICES = 256
SPARE_FILES = 8  # with fewer files to open, health says that no request can be taken
RETRY_SECONDS = 0.1
"""Time before a background task goes on after an error, such as too many open files."""
METRICS_CONNECTIONS = 16
METRICS_SECONDS = 10.0  # longest time of a connection to the metrics endpoint

# Drafter services.
READ_BYTES = 256 * KIB  # what is read from a drafter service's socket between two steps
STEP_MESSAGES = 64  # messages of a drafter service that are processed between two steps
LATE_ANSWERS = 4096
"""Most answers of a drafter service for sequences that are closed; three for each of them."""
LIST_SECONDS = 0.1  # time between two lists of drafters that are taken from a service
DRAFTERS = 256  # drafters of a service
DRAFTER_LIST_BYTES = 256 * KIB
DRAFTER_LISTS_BYTES = 2 * MIB
"""Lists of all services together, which GetModel sends to each client in a message of 4 MiB."""
LOGGED_NAMES = 8  # names of drafters in a line of the log
NAME_CHARS = 256  # longest name or version of a drafter

# Requests for text.
STOP_TOKENS = 1024
TOP_LOGPROBS = 20
UNUSED_SECONDS = 5.0
"""Longest lease of a cache until it is used: its client may have left while it was made."""
ABANDONED_SECONDS = 2.0  # while a verifier drains, a text that nobody has read for this time ends
FIRST_MESSAGE_SECONDS = 10.0  # a stream whose peer sends no message for this time ends
WRITE_SECONDS = 30.0  # a stream whose peer takes no message for this time ends
WAITING_FOR_MEMORY = 1024  # requests that wait for KV memory

# JSON schemas, regular expressions and grammars.
CONSTRAINT_BYTES = 64 * KIB
CONSTRAINT_SECONDS = 3  # processor time to compile one
CONSTRAINT_WAIT_SECONDS = 30.0
"""Longest time until it is compiled, on a machine that has other work."""
CONSTRAINT_MEMORY = 256 * MIB  # memory to compile one, the process's included
CONSTRAINTS_COMPILING = 2
CONSTRAINTS_WAITING = 64
CONSTRAINTS_LIVE_BYTES = GIB  # memory of all compiled constraints that are in use
CONSTRAINT_STATES = 50_000  # states of the lexer of one; 1 to 2 KiB each
MASK_SECONDS = 0.003
"""Processor time of a mask. Those of a constraint that takes more on average are computed on a
thread of their own, and its texts sit out meanwhile."""
STEP_MASKS_SECONDS = 0.010
"""Processor time for the other masks in a step, or else as long as the step before took."""
