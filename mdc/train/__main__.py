"""What torchrun starts, once per rank:

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m mdc.train \\
        --params params.yaml --shards data/shards --output outputs/model --work runs
"""

import argparse
import logging
import signal
import sys
from pathlib import Path

from mdc.processes import end_with_parent, is_first_rank, on_ctrl_c


def main() -> None:
    end_with_parent()
    # At once and without a traceback, whatever this rank waits for; from the first step on, see `mdc.train.watch.Stop`.
    on_ctrl_c(signal.SIG_DFL)
    parser = argparse.ArgumentParser(prog="python -m mdc.train", description=__doc__)
    parser.add_argument("--params", type=Path, required=True, help="the parameter file")
    parser.add_argument("--shards", type=Path, required=True, help="the folder that stage `shard` made")
    parser.add_argument("--output", type=Path, required=True, help="the checkpoint folder to make")
    parser.add_argument("--work", type=Path, required=True, help="the folder for trainings under way")
    parser.add_argument("--launched", action="store_true", help="leave it to the launcher to tell mistakes")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("mdc").setLevel(logging.INFO if is_first_rank() else logging.ERROR)  # the others would repeat it

    from mdc.config import load_params
    from mdc.errors import UserError
    from mdc.train.trainer import train

    try:
        params = load_params(arguments.params)
        train(params, arguments.shards, arguments.output, arguments.work, arguments.launched)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
