"""The parser that `vllm` and its commands are made of."""

import argparse


class FlexibleArgumentParser(argparse.ArgumentParser):
    """vLLM's own takes underscores for hyphens, and a file of settings, too."""
