"""`vllm serve` as far as its arguments: those that this project gives, as vLLM 0.32.0 takes them.

The real parser was seen to answer alike to what the tests give both, with the package's wheel on a
machine without accelerators, its device named by hand.
"""

import argparse


class ServeSubcommand:
    def subparser_init(self, subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
        parser = subparsers.add_parser("serve", usage="vllm serve [model_tag] [options]")
        parser.add_argument("model_tag", nargs="?")
        parser.add_argument("--host")
        parser.add_argument("--port", type=int)
        parser.add_argument("--served-model-name", nargs="+")
        parser.add_argument("--generation-config")
        parser.add_argument("--max-model-len", type=int)
        parser.add_argument("--gpu-memory-utilization", type=float)
        parser.add_argument("--tensor-parallel-size", type=int)
        parser.add_argument("--dtype", choices=["auto", "half", "bfloat16", "float"])
        parser.add_argument("--enable-auto-tool-choice", action="store_true")
        parser.add_argument("--tool-call-parser")
        return parser

    def validate(self, arguments: argparse.Namespace) -> None:
        if arguments.enable_auto_tool_choice and not arguments.tool_call_parser:
            raise TypeError("Error: --enable-auto-tool-choice requires --tool-call-parser")
