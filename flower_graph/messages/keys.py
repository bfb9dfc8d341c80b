"""Keys on the wire that several modules name; the others stand in the messages themselves.

Numbers that must arrive exactly as they left (identities, rounds) travel in the ``ConfigRecord``
as bytes, because mods such as ``LocalDpMod`` add noise to everything in the ``ArrayRecord``. That
mod also wants the same keys up and down, so a latent vector and its gradient share one key.
"""

# Records
ARRAYS, AVERAGE, CONFIG, METRICS = "arrays", "average", "config", "metrics"
# Arrays: latent vectors up, their gradients down; averaged weights both ways; how many users held
# each row, up
RELAY, WEIGHTS, HOLDERS = "relay", "weights", "holders"
# Exact integers, as little-endian bytes
USERS, GRADIENT_ROUND = "users", "gradient-round"
# Scalars
AVERAGE_ROUND = "average-round"
SERVER_ROUND = "server-round"  # the round, as Flower's FedAvg says it
CHECKPOINT = "checkpoint"
HANDLED = "handled-messages"  # how many a client has behind it; 0 if it has no state of the run
RUN_TOKEN, NOT_SAVED = "run-token", "not-saved"  # whose checkpoint; why a client could not write it
LATENT_SIZE, SEED = "latent-size", "seed"
LEARNING_RATE, WEIGHT_DECAY = "learning-rate", "weight-decay"
AVERAGE_OVER, WEIGHT_SHAPE = "average-over", "weight-shape"
# Secure sum: setting up; and three stages whose entries may share one message, so each stage has
# its own
SUM_RUN = "sum-run"
SUM_STATE, MASKED_SUM = "secure-sum", "masked-sum"
PREPARE_RUN = "prepare-run"
MASK_LENGTH = "mask-length"
UNMASK_RUN = "unmask-run"
# Alignment of identities: the stage that a request is for; clients; points
ALIGN_STAGE, ALIGN_CLIENTS, ALIGN_POINTS = "align-stage", "align-clients", "align-points"
# ... and in the forms that hide nothing
ALIGN_PRIME, ALIGN_COEFFICIENTS = "align-prime", "align-coefficients"
ALIGN_IDENTITIES = "align-identities"
# LocalSage+ and FedSage+: encoded nodes that miss neighbours; how many nodes each client has of
# these and how many neighbours each misses; correct predictions and nodes by split; losses
CLIENTS, ROWS, MISSING = "clients", "rows", "missing"
COUNTS, LOSSES, EPOCH, SHARE = "counts", "losses", "epoch", "share"
HIDDEN_SIZE, LOCAL_EPOCHS = "hidden-size", "local-epochs"
NUM_FEATURES, NUM_CLASSES = "num-features", "num-classes"
# FedSCem: sums by slot and counts of holders, both ways; a full model, both ways; how the sums are
# written; what a message is for, and how long it took
SUMS, TOTAL, EMBEDDINGS, HOLDER_COUNTS = "sums", "total", "embeddings", "holder-counts"
MODEL, FIRST, REST = "model", "first", "rest"
ALIGNMENT, VARIANT, SHARES_MODEL, IS_LAST = "alignment", "variant", "shares-model", "is-last"
SUMS_ROUND, CONTRIBUTORS, SLOTS = "sums-round", "contributors", "slots"
RING_WORD = "word"
PRESENT, LEFT_OUT = "present", "left-out"
PROJECTION, MU, TAU, PROXIMAL = "projection", "mu", "tau", "proximal"
TRAIN_SECONDS, MASK_SECONDS = "train-seconds", "mask-seconds"
# PPFL-GNN: embeddings of public nodes up, their aligned means down; whose they are and how many
# rows each has; which clients have means, and of which ids, by a fingerprint
PUBLIC, NODES, DIMENSIONS, WITH_TARGETS = "public", "nodes", "dimensions", "with-targets"
FINGERPRINTS, WANTS_EMBEDDINGS, DISAGREEMENT = "fingerprints", "wants-embeddings", "disagreement"
FOLLOWS = "follows"  # whether the server knows of earlier rounds of these clients
JUDGED = "judged-"  # before the name of each measurement
# ... in sums that nobody can take apart: which means may be learnt from, and how clients turn
IS_TARGET, ROTATIONS_ONLY = "is-target", "rotations-only"
# How the adaptor (``client.adaptor``) names the arrays of a reply, and what it says of itself
# in the answer to a ``query``: version, and FORMAT of the messages that it understands
ARRAY_NAMES = "array-names"
VERSION, MESSAGE_FORMAT = "flower-graph", "message-format"
FORMAT = 2  # counts up whenever a server of one version cannot work with clients of another
# Largest number that can be a weight, an embedding or a latent vector's. Ten thousand times more
# than any that we have seen; squares of it, added up over a large graph, still fit into float32.
MAX_NUMBER = 2.0**20
# Metrics that Flower's own strategies look for
NUM_EXAMPLES, LOSS = "num-examples", "loss"
EXTRAS = "extras"  # the record of arrays that a client of a method that averages sends besides
MAX_WEIGHT = 2**53  # above it, float64 does not tell whole numbers apart
