"""Keys on the wire that several modules name; messages declare the others.

Numbers that must arrive unchanged (identities, rounds) are sent in the ``ConfigRecord`` as bytes,
because mods such as ``LocalDpMod`` add noise to everything in the ``ArrayRecord``. That mod also
needs the same keys in both directions, so a latent vector and its gradient share one key.
"""

# Records
ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
SERVER_ROUND = "server-round"  # the round, under the key of Flower's FedAvg
CHECKPOINT = "checkpoint"
HANDLED = "handled-messages"  # messages that a client has handled; 0 if it has no state of the run
RUN_TOKEN, NOT_SAVED = "run-token", "not-saved"  # whose checkpoint; why a client could not write it
# Several methods
CLIENTS, ROWS, LEFT_OUT = "clients", "rows", "left-out"
SEED = "seed"
# Methods that average: whether a request's and an answer's arrays have a row for each client
OWN_ARRAYS, ROW_EACH = "own-arrays", "row-each"
# Secure sum, and the stage of the alignment that a request is for
SUM_STATE, MASKED_SUM, RING_WORD = "secure-sum", "masked-sum", "word"
ALIGN_STAGE = "align-stage"
# nFedGNN: exact integers, as little-endian bytes
USERS, GRADIENT_ROUND = "users", "gradient-round"
# LocalSage+ and FedSage+
EPOCH = "epoch"
# FedSCem: sums by slot and counts of holders, both ways; a full model; what a message is for
SUMS, TOTAL, RELAYED = "sums", "total", "relayed"
IS_LAST = "is-last"
# PPFL-GNN: embeddings of public nodes up, their aligned means down
PUBLIC, WITH_TARGETS = "public", "with-targets"
MEASURED = "judged-"  # before the name of each measurement
# Of the adaptor: names of a reply's arrays; in the answer to a ``query`` its version and format
ARRAY_NAMES = "array-names"
VERSION, MESSAGE_FORMAT = "flower-graph", "message-format"
FORMAT = 3  # counts up whenever a server of one version cannot work with clients of another
# Largest weight, embedding or latent vector's number: ten thousand times more than any that we have
# seen; squares of it, added up over a large graph, still fit into float32
MAX_NUMBER = 2.0**20
MAX_CLASSES = 100_000  # a label above is no class
ROLES = ("train", "val", "test")  # of labelled nodes
# Metrics that Flower's own strategies look for
NUM_EXAMPLES, LOSS = "num-examples", "loss"
EXTRAS = "extras"  # the record of arrays that a client of a method that averages sends besides
MAX_WEIGHT = 2**53  # above it, float64 does not tell whole numbers apart
# Metrics of predictions, as settings, reports and results name them: of nodes, links and numbers
NODE_SCORES = ("accuracy", "macro-f1", "balanced-accuracy", "auc")
ACCURACY, MACRO_F1, BALANCED, AUC = NODE_SCORES
AP, RANKED = "ap", ("hits@20", "hits@50", "mrr")
LINK_SCORES = (ACCURACY, AUC, AP, *RANKED)
# Of numbers that nodes learn: the less, the better
MSE, MAE = VALUE_SCORES = ("mse", "mae")
SCORES = (*NODE_SCORES, AP, *RANKED, *VALUE_SCORES)
# What of predictions must be counted for the others, each with those before it; and the entries
CONFUSION, HISTOGRAMS, RANKS = COUNTINGS = ("confusion", "histograms", "ranks")
ERRORS = "errors"  # instead: of numbers, sums of errors
COUNTING, COUNTED = "counting", "counts"
