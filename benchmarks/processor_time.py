"""Runs a program whose clock is the processor time that it takes: `MODULE ARGUMENTS...`.

On a machine that does other work too, the rates that a program tells of itself are then its own.
With one thread they are what it would reach alone.
"""

import runpy
import sys
import time

if __name__ == "__main__":
    del sys.argv[0]
    time.perf_counter = time.process_time
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
