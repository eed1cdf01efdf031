"""What the kernels and their host share: every column, row, flag and guard constant, named once.

Triton reads these as constants; `tables` fills the tables by these names. To let a kernel know more of a step, add a
column here, fill it in `tables`, and read it there.
"""

import math
import zlib

import torch

from ...math import constants, guards, stepsize

# columns of the table of addresses, which has one row per block; the last count them
(
    WEIGHT, GRAD, BUFFER, LEVEL, BIAS_GRAD, BIAS_BUFFER, SLOTS, TALLY, CENTRE,
    MX, VX, MASS, SHARING, SQUARE, SQUARE_MASS,
    TO_RULE, BIAS_TO_RULE, FROM_RULE, BIAS_FROM_RULE,  # gradients for a rule in torch operations, and its steps
    MEMORY_OF_RULE,  # the momentum of such a rule's matrices
    ADDRESSES,
) = range(21)  # fmt: skip
STATE = ("mx", "vx", "mass", "sharing", "square", "square_mass")  # state of the weight, in the order of its columns

# columns of the table of shapes
(
    COLUMNS, INPUTS, INNER, PER_GROUP, BASE, START, FLAGS, UNITS,
    ALL_INPUTS, SLOT_COUNT, COUNTER, PIECES, RULE_ROW, BIAS_RULE_ROW,
    SHAPES,
) = range(15)  # fmt: skip

# columns of the table of settings
(
    RATE, BIAS_RATE, RATIO, DECAYED, BIAS_DECAYED, RADIUS, DAMPING, TAU,
    MEMORY, EPS, UNIT_DAMPING, DECLARED, FAN_IN,
    SETTINGS,
) = range(14)  # fmt: skip

# those that are settings of the weight's group: their names there, and the number for None or no such setting
OF_GROUP = {
    RADIUS: ("trust", math.inf),
    DAMPING: ("damping", 0.0),
    TAU: ("fresh_max", math.inf),
    MEMORY: ("decay", 0.0),
    EPS: ("eps", 0.0),
    DECLARED: ("sharing", math.nan),
}

# flags in the table of shapes
BIASED = 1  # its bias trains with it
WHITENED = 2  # it has moments
COUNTED = 4  # what the guards do is counted
MAXIMIZE = 8
SHARED = 16  # it has a sharing count
PLAIN = 32  # it is outside layers
TURNED = 64  # its channels lie last in memory, but not in the matrix that a rule sees

# rows of `vectors`: one number per input
MU, ALPHA, SPREAD, FRESH = range(4)
VECTORS = 4
# rows of `batch`: one number per input
FIRST, SECOND = range(2)
# columns of `layers`, which has one row per block
BETA, SHARE, USABLE, RAISED, CONSTANT, KEPT = range(6)  # KEPT: what parameters are multiplied by before the step
LAYERS = 6
# rows of `sums`: one number per unit; the last three for layers without bias
GRAD2, ALONG, STRETCH, BENT2, MEAN, LENGTH2, DIRECTION, SHIFT, KAPPA, NORM2 = range(10)
SUMS = 10
# rows of `motion`: one number per unit
GAIN, BACK, BIAS_STEP = range(3)
MOTION = 3
# columns of the guards' counters
COUNTERS = 3
# the tally of a layer
ROWS, ZEROS, USES, EXAMPLES = range(4)

# constants of the mathematics
TINY, STEADY, LONG = torch.finfo(torch.float32).tiny, constants.STEADY, stepsize.LONG
CROWD, LEAST, DRIFT = guards.CROWD, guards.LEAST, guards.DRIFT

# all kernels take this number: their builds on disk are kept by their source, which does not say what these names mean
VERSION = zlib.crc32(repr([(k, v) for k, v in sorted(globals().items()) if k.isupper()]).encode()) >> 1
