"""Imported first where all that is imported stays: nothing of it is garbage to look for."""

import gc
import sys

gc.disable()
# Where it was true as the tests began, it is handed on by a flag of the command line.
sys.dont_write_bytecode = False
