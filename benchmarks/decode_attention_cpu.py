"""How fast one decoding step's attention and rotary embedding are on the CPU, beside transformers with SDPA.

Run `python benchmarks/decode_attention_cpu.py` (some minutes), `--quick` for a look, `--json` for machines. Needs
transformers. Shapes are those of Llama 3 8B: 32 heads of queries, 8 of keys, of 128 elements. Each line is one number
of threads, dtype, number of sequences and length of their contexts; all have the same, the best case for SDPA:

    ours          time of one call of the op through irframework with `vllm_c`, in microseconds: the least of all
                  rounds. Keys and values are in a paged cache, whose blocks of 16 lie in no order
    grouped       the same for transformers' function for SDPA over contiguous keys, as a DynamicCache holds them,
                  without a mask: SDPA with enable_gqa
    packed        the same with a mask that hides nothing, as a padded batch has: the queries of a group become rows
    repeated      the same after repeat_kv, as transformers does when it compiles with a mask
    theirs/ours   the fastest of the three divided by ours, and in brackets the quartiles of that ratio over the rounds.
                  The goal is at least 1

and for the rotary embedding `ours` beside transformers' `apply_rotary_pos_emb` of Llama, with cosines and sines that
were gathered before, which ours gathers itself.

What transformers does to append to its cache (a copy of all of it, in DynamicCache) is not in these times; neither is
our write to the cache. All contestants of a line take turns within each round, in an order that rotates; with one
thread the clock is that thread's processor time, which does not count other programs.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace

from kernels_cpu import ALLOCATOR, measure, ratio

if __name__ == "__main__" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    # glibc reads these before main(), so only a new process sees them.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})

import torch
import torch.nn.functional as F
from irframework_vllm_c import library
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import irframework as ir

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; times in microseconds, the ratio as (of the least times, lower and upper quartile)."""

    op: str
    threads: int
    dtype: str
    sequences: int
    context: int
    times: dict[str, float]
    theirs_to_ours: tuple[float, float, float]


def attention_calls(sequences: int, context: int, dtype: torch.dtype) -> dict[str, Call]:
    """What takes part for one shape: a call without arguments by contestant."""
    key, value = (torch.randn(sequences, KV_HEADS, context, SIZE).to(dtype) for _ in range(2))
    query = torch.randn(sequences, HEADS, 1, SIZE).to(dtype)
    mask = torch.ones(sequences, 1, 1, context, dtype=torch.bool)
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)
    blocks = sequences * context // BLOCK
    table = torch.randperm(blocks, dtype=torch.int32).view(sequences, -1)
    caches = []
    for tensor in (key, value):
        cache = torch.empty(blocks, BLOCK, KV_HEADS, SIZE, dtype=dtype)
        cache[table.flatten().long()] = tensor.transpose(1, 2).reshape(cache.shape)
        caches.append(cache)
    offsets = torch.arange(sequences + 1, dtype=torch.int32)
    lengths = torch.full((sequences,), context, dtype=torch.int32)
    rows = query[:, :, 0]

    def repeated() -> object:
        keys, values = (repeat_kv(tensor, HEADS // KV_HEADS) for tensor in (key, value))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return out.transpose(1, 2).contiguous()

    return {
        "ours": lambda: ir.ops.attention(rows, None, None, offsets, 1, lengths, context, *caches, table),
        "grouped": lambda: sdpa_attention_forward(module, query, key, value, None)[0],
        "packed": lambda: sdpa_attention_forward(module, query, key, value, mask)[0],
        "repeated": repeated,
    }


def rotary_calls(sequences: int, context: int, dtype: torch.dtype) -> dict[str, Call]:
    """As `attention_calls`, for the rotary embedding of one token of each sequence."""
    angles = torch.arange(context)[:, None] / 500000.0 ** (torch.arange(0, SIZE, 2) / SIZE)
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.full((sequences,), context - 1)
    cos, sin = (half[:, None].repeat(1, 1, 2) for half in cache[positions].chunk(2, -1))
    query, key = torch.randn(sequences, HEADS * SIZE).to(dtype), torch.randn(sequences, KV_HEADS * SIZE).to(dtype)
    apart = [t.view(sequences, 1, -1, SIZE).transpose(1, 2) for t in (query, key)]
    return {
        "ours": lambda: ir.ops.rotary_embedding(positions, query, key, cache, SIZE),
        "transformers": lambda: apply_rotary_pos_emb(*apart, cos, sin),
    }


CALLS = {"attention": attention_calls, "rotary_embedding": rotary_calls}


def check(op: str, calls: dict[str, Call]) -> None:
    """All contestants compute the same, or the times say nothing."""
    want = calls["ours"]()
    for name, call in calls.items():
        for got, right in zip(*((x if isinstance(x, tuple) else (x,)) for x in (call(), want)), strict=True):
            torch.testing.assert_close(got.reshape(right.shape), right, atol=0.05, rtol=0.05, msg=f"{op}: {name}")


def lines(args: argparse.Namespace, op: str) -> list[Line]:
    """Measures everything that was asked for about an op, printing each line when it is known."""
    found = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in args.dtype:
            for sequences in args.sequences:
                for context in args.context if op == "attention" else args.context[-1:]:
                    calls = CALLS[op](sequences, context, DTYPES[dtype])
                    if "repeated" in calls and not args.repeated:
                        del calls["repeated"]
                    check(op, calls)
                    times = measure(calls, args.rounds, args.seconds)
                    least = {name: min(values) * 1e6 for name, values in times.items()}
                    theirs = [values for name, values in times.items() if name != "ours"]
                    found.append(Line(op, threads, dtype, sequences, context, least, ratio(theirs, times["ours"])))
                    if not args.json:
                        print(text_of(found[-1]), flush=True)
    return found


def text_of(line: Line) -> str:
    times = " ".join(f"{time:12.1f}" for time in line.times.values())
    best, low, high = line.theirs_to_ours
    where = f"{line.threads:>7} {line.dtype:>9} {line.sequences:>9} {line.context:>7}"
    return f"{where} {times}   {best:6.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=list(CALLS), nargs="+", default=list(CALLS))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 4096], help=f"multiples of {BLOCK}")
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9, help="rounds per line")
    parser.add_argument("--seconds", type=float, default=0.01, help="seconds per contestant and round, at least a call")
    parser.add_argument("--repeated", action=argparse.BooleanOptionalAction, default=True, help="time repeat_kv, too")
    parser.add_argument("--quick", action="store_true", help="contexts of 128 and 1024, 5 rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    if args.quick:
        args.context, args.rounds = [128, 1024], 5
    isa = library.instruction_set()
    found: list[Line] = []
    with torch.inference_mode(), ir.priority(dict.fromkeys(CALLS, "vllm_c")):
        for op in args.op:
            if not args.json:
                names = ("grouped", "packed", *(["repeated"] if args.repeated else []))
                head = " ".join(f"{n:>12}" for n in ("ours", *(names if op == "attention" else ["transformers"])))
                print(f"{op}, torch {torch.__version__}, kernels for {isa}, times in us")
                print(f"threads     dtype sequences context {head}   theirs/ours")
            found += lines(args, op)
    slow = [x for x in found if x.theirs_to_ours[0] < 1]
    if args.json:
        print(json.dumps({"torch": torch.__version__, "isa": isa, "lines": [asdict(x) for x in found]}, indent=2))
    else:
        print("\n".join(f"slower than transformers: {text_of(x)}" for x in slow) or "All goals met.")


if __name__ == "__main__":
    main()
