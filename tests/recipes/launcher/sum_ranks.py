"""A distributed program: sums the ranks of all workers, writes the sum, ends as it is told."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    status = int(sys.argv[1])
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        record = {"sum": int(total), "world": dist.get_world_size(), "node": os.environ["RANK"]}
        Path(os.environ["OUTPUT_FOLDER"], "sum.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
