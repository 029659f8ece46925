"""vLLM's server as a process forked from one that has imported vLLM: a script for tests/engines/forker.py.

Its engine is forked too, where vLLM would start one that imports everything once more on a CPU.
"""

import multiprocessing
import runpy

from vllm.v1.engine import utils


def main() -> None:
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
