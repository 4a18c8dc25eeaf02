"""The decoder of `decoder_layer.py` with fusion by definition: what is fused by hand beside what the compiler finds.

    python benchmarks/fusion.py --json fusion.json                           # on the machine with the GPU, four minutes
    python benchmarks/fusion.py --cases decode1 --kinds bf16,fp8
    python benchmarks/fusion.py --device cpu --tiny                          # anywhere: does it run

Its options are those of `decoder_layer.py`. Goals are times over the floor, below; `parts` and `raised` also say how
far the compiler gets without any fused op in the model, `moves` what Inductor's kernels take to move the same bytes.
"""

import sys

from decoder_layer import FURTHER, VARIANTS, main

if __name__ == "__main__":
    sys.exit(main((*VARIANTS, *FURTHER)))
