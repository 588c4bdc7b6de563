"""Imported first where all that is imported stays: nothing of it is garbage to look for."""

import gc

gc.disable()
