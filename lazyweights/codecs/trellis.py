import numpy as np
N_STATES = 32
TRANSITIONS = np.array([[(s >> 1) ^ (18 if s & 1 else 0) ^ (4 if b else 0) for b in range(2)] for s in range(32)], np.int64)
