"""The command line: one module a verb; parsing and printing only.

No module here imports more than the standard library and `lazyweights.errors` at its top, so that ``--help`` answers
at once: numpy, numba and rich load when a verb runs that needs them.
"""
