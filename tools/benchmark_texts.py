"""docs/benchmarks.md in words: what stands before each of its tables (`make_benchmarks.py`)."""

PLANNERS = """\
# Benchmarks of the planners

Made by `python tools/make_benchmarks.py` from the rows in `benchmarks/results`; do not edit. The loader's are in
[loader_performance.md](loader_performance.md).

Planning times are measured on the machine named with each table. **Step times are simulated**, with Evenload's
analytic cost model of H100, for every planner alike; no GPU was used. Compare them with each other, not with a clock.

## Beside other planners

    pip install 'evenload[bench]' && pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/planners.py [--quick] [--append] [--picture] [--layout pp4|pp1]

One global batch, one process, one cost model, one simulator; llama-7b on 32 H100. Packs of whole documents run in 1F1B,
and packs of planners without an own data-parallel assignment are dealt round robin in the planner's order. All packs
are priced as Evenload's runtime computes them, peers' too. `slimpack` and `auto` may share a long document among
replicas, as `evenload plan` lets them; no peer can. Every plan is checked: each document
once, each token once each way.

| column | meaning |
|---|---|
| plan ms | median of 3 after a warm-up; peers: the packing call alone; Evenload: all up to the sealed plan |
| packs, fill | forward packs of all replicas; tokens over packs x token limit |
| left, over | documents in no pack; packs above the token limit |
| fwd, bwd | max/mean pack time, worst replica; peers' figures are those of their packs as they are |
| DP | max/mean forward + backward time of replicas |
| of bound | lower bound (all useful work, spread evenly over all devices) over simulated step time, memory ignored |
| GiB | peak memory when all activations are stored |
| in 80 GB | of bound again, within 75 GB: activations stored, recomputed or offloaded, the fastest way that fits |

How many micro-batches a replica gets under a peer is what its users get:
"""
PIPELINE = """\
### DP 8 x PP 4
"""
NO_PIPELINE = """\
### DP 8 x TP 4, no pipeline

Without a pipeline micro-batches run one after the other and never wait for each other: their number and their evenness
inside a replica do not matter, and a peer's usual number is as good as any. What is left to a planner is the evenness
of replicas, the constant of a micro-batch, and memory: where no document is longer than a replica's share of the
tokens, any planner that evens out replicas is as good as ours.
"""
GROWTH = """\
## Planning time over batch size

    python benchmarks/planning_growth.py [--quick] [--append] [--picture]

Milliseconds to plan and choose, the sealed plan included; lognormal lengths, DP 8 x PP 4, packs of at most 32K tokens,
80 GB devices, activation policies chosen and documents shared among replicas. The dashes in the picture are our targets
for `slimpack`: 20 ms for 512 documents, 100 ms for 2,048. They were reached in rows of 2026-11-21, which stored all
activations and shared nothing; what users get now takes longer.

![Planning time over documents](../benchmarks/results/planning_growth.png)
"""
SLIMPACK = """\
## SlimPack's settings

    python benchmarks/paper_slimpack.py [--quick] [--append] [--documents 1024]

**Simulated.** Each strategy at its own best layout of tp x cp x pp x dp x virtual stages within 80 GB. Speed-ups are
over `best_fit` tuned over all layouts, tuned over those with at least 4 pipeline stages, and at the median of all
layouts that fit. The paper compares with a Megatron-LM whose layouts it does not publish. The last column says what
most of the rest of the lower bound is lost to. `slimpack` and `auto` share documents among replicas (DP-Merge), `auto`
also splits backwards.
"""
WLB = """\
## WLB-LLM's settings

    python benchmarks/paper_wlb.py [--quick] [--causes] [--append]

**Simulated.** The layouts of its Table 1, batches of PP x DP windows, 32 steps. Plain-4D is the loader's windows as
they come, each shared per sequence by the context ranks; Fixed-4D packs a global batch anew, per sequence or per
document throughout, whichever is faster; "adaptive" and both `wlb` choose the sharding for every micro-batch. The paper
measured 1.03 for Fixed-4D and 1.23 for WLB-LLM (64K: 1.15, 128K: 1.30; Fig. 12), and 1.05 of the sharding alone at 7B
and 128K.

Why WLB-LLM N gains less here than in the paper, and little over Fixed-4D, says the table of changes (`--causes`).
Whole documents do not fill N windows of a context exactly, so our Fixed-4D takes more of them than N = PP x DP (5
instead of 4), which fill the pipeline better; in N slightly longer windows it gains 0.07, not 0.12. No packing balances
transfers of keys, values and hidden states: without them WLB-LLM N gains half as much again. And packs shared per
sequence or per document pay for keys that travel although their documents are short, which `mixed` avoids.
"""

SKRULL = """\
## Skrull's settings

    python benchmarks/paper_skrull.py [--quick] [--append]

**Simulated.** Its models, data sets (from the shares of its Table 1), layouts and batch sizes on 32 devices, 8 steps.
The paper reports means of 5.50 (0.5B) and 2.03 (7B) over DeepSpeed. "one a pass" runs every document alone, sharded
over all context ranks, and pays every transfer's latency once a document and layer, as the simulator has priced them
since November 2026; what DeepSpeed ran lies between that and `best_fit`, so the last column says more.
"""
FLEXPIPE = """\
## FlexPipe's settings

    python benchmarks/paper_flexpipe.py [--quick] [--append]

**Simulated.** Models and clusters of its Table 1, 24 steps. Time of each way to train over the time of `flexpipe`;
"best fixed" is the fastest single layout in hindsight.
[planner.md](planner.md#flexpipe-another-layout-between-steps) says why switching gains nothing over it. "documents
only" has no layers that recompute (the paper's O_plan).
"""
SWITCH = """\
## A change of the layout

    python benchmarks/reconfigure.py [--quick] [--append]

**Measured.** Four CPU processes train a Llama of 94 M parameters in fp32 and change between three layouts (like
FlexPipe's Fig. 10). How long training stands still, over what two other ways take, in one run: the same moves without
shared memory, nothing prepared and waiting for all of them (stop and transfer), and a checkpoint that new processes
load; and over what was predicted: by the copies that the run measured at its start, and corrected by earlier switches
of the kind, as decisions take it. Medians of rounds by turns. "With waiting": and what the optimizer still waits for
behind the first step.
[Decision 31](decisions/0031-live-switching.md) says how.
"""
DELAY = """\
## Documents that wait

    python benchmarks/wlb_delay.py [LENGTHS ...] [--quick] [--append]

Imbalance of N micro-batches (longest over mean, forward + backward) and mean delay of a token in steps, llama-7b at
128K, 40 steps, mean of 3 seeds: `wlb` with its two release rules.
"""
ABLATION = """\
## Which ideas pay

    python benchmarks/ablation.py [--quick] [--append]

**Simulated**, 80 GB, 3 batches of 1,024 documents. Share of the lower bound, one change at a time to the base:
symmetric cuts under the list schedule, without a pipeline whole documents, policies and sharing chosen by search.
"(+4 GiB)": does not fit, by so much in the worst batch. [planner.md](planner.md#which-ideas-pay) draws the conclusions.
"""
