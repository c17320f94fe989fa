"""Makes the sparse demonstration model: the demonstration's target with experts in place of its MLPs.

  python models/recipe/train_sparse.py --out DIR [--dense models/demo] [--work DIR] [--steps N]

Every MLP is cut into experts of neurons that are active together (Zhang et al., "MoEfication",
arXiv 2110.01786), beside a few that all experts get a copy of, and the whole learns the dense target's
distributions again, with a loss that balances each layer's experts (Fedus et al., "Switch Transformers",
arXiv 2101.03961).  The family is Mixtral's, whose attention is Llama's.  Takes half an hour on one core; an
interrupted run resumes.  The head is then trained on from the dense one:

  flowspec models train-head --model DIR --kind eagle2 --start models/demo/eagle2
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_lm import bits_per_byte, load_lm, save_lm
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from flowspec_edge.errors import FlowspecError
from flowspec_edge.lab.training.loop import (
    LoopOptions,
    Optimiser,
    Run,
    backpropagate,
    compiled,
    train,
    windows,
)
from flowspec_edge.lab.training.python_source import TokenizedCorpus, prepare_for
from flowspec_edge.lab.training.text_files import make_part
from flowspec_edge.util.files import make_directory
from flowspec_edge.util.tomlfile import toml_table

_SAMPLE = 40_000  # held-out tokens that are measured


@dataclass(frozen=True)
class SparseRecipe:
    """The shape and schedule of the sparse model; lengths and batches in tokens.

    shared   a layer's most active neurons, copied into every expert
    inner    neurons of an expert; what is left after its own and the shared ones are copies to train
    balance  weight of the balancing loss, which is 1 for experts in equal use
    """

    experts: int = 16
    chosen: int = 4
    inner: int = 48
    shared: int = 16
    balance: float = 0.02
    steps: int = 130
    window: int = 256
    tokens_per_step: int = 4096
    micro_batch: int = 2048
    muon_lr: float = 0.01
    adam_lr: float = 2e-3
    decay_from: float = 0.3
    seed: int = 0


class Mixture(nn.Module):
    """A layer's experts side by side in three matrices, so that training multiplies once for all of them.

    router  [E, H]; gate, up  [E I, H]; down  [H, E I]
    balance  of the last pass: E sum_e (share of choices of e) (mean probability of e), 1 at best
    """

    def __init__(self, recipe: SparseRecipe, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.recipe = recipe
        self.router, self.gate = nn.Parameter(router), nn.Parameter(gate)
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        experts, k = self.recipe.experts, self.recipe.chosen
        shares = F.linear(x, self.router).softmax(-1)
        top, expert_ids = shares.topk(k, dim=-1)
        weights = torch.zeros_like(shares).scatter(-1, expert_ids, top / top.sum(-1, keepdim=True))
        used_shares = (weights > 0).to(shares.dtype).flatten(0, -2).mean(0) / k
        self.balance = experts * (used_shares * shares.flatten(0, -2).mean(0)).sum()
        inner = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        weighted = inner.unflatten(-1, (experts, -1)) * weights[..., None]
        return F.linear(weighted.flatten(-2), self.down)


@torch.no_grad()
def upcycle(dense: LlamaForCausalLM, rows: Tensor, recipe: SparseRecipe) -> LlamaForCausalLM:
    """Return ``dense`` with a :class:`Mixture` in place of each MLP, cut by what ``rows`` [B, n] activate."""
    model = LlamaForCausalLM(dense.config)
    model.load_state_dict(dense.state_dict())
    inputs: list[Tensor] = []
    hooks = [layer.mlp.register_forward_hook(lambda _m, arguments, _out: inputs.append(arguments[0].flatten(0, 1)))
             for layer in model.model.layers]
    model(input_ids=rows, use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer, x in zip(model.model.layers, inputs, strict=True):
        layer.mlp = _cut(layer.mlp, x, recipe)
    return model


def _cut(mlp: Any, x: Tensor, recipe: SparseRecipe) -> Mixture:
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    strength = (F.silu(x @ gate.T) * (x @ up.T)).abs() * down.norm(dim=0)  # [n, neurons]
    order = strength.mean(0).argsort(descending=True)
    shared, routed = order[: recipe.shared], order[recipe.shared :]
    groups = _balanced_groups(strength[:, routed].T, recipe.experts)
    gates, ups, downs, energies = [], [], [], []
    for e in range(recipe.experts):
        mine = routed[groups == e]
        energies.append(strength[:, mine].sum(1))
        copies = order[torch.arange(recipe.inner - len(shared) - len(mine)) + recipe.shared]
        picked = torch.cat((shared, mine, copies))
        # A row's weights sum to 1: shared neurons count once, and the others are as strong as without a
        # choice if the chosen experts' weights are equal.
        scale = torch.cat((torch.ones(len(shared)), torch.full((len(mine),), float(recipe.chosen)),
                           torch.zeros(len(copies))))
        gates.append(gate[picked])
        ups.append(up[picked])
        downs.append(down[:, picked] * scale)
    energy = torch.stack(energies, 1)
    # Ridge regression from the layer's input to each expert's part of the sum, as logits.
    standardised = (energy - energy.mean(0)) / energy.std(0)
    router = torch.linalg.solve(x.T @ x + 1e-2 * len(x) * torch.eye(x.shape[1]), x.T @ standardised).T
    return Mixture(recipe, router.contiguous(), torch.cat(gates), torch.cat(ups), torch.cat(downs, 1))


def _balanced_groups(features: Tensor, groups: int, rounds: int = 12) -> Tensor:
    """Cluster ``features`` [m, n] by direction into groups of (almost) equal size, with k-means: int64 [m]."""
    unit = F.normalize(features - features.mean(1, keepdim=True), dim=1)
    generator = torch.Generator().manual_seed(0)
    centres = unit[torch.randperm(len(unit), generator=generator)[:groups]]
    room = -(-len(unit) // groups)
    assigned = torch.zeros(len(unit), dtype=torch.int64)
    for _ in range(rounds):
        likeness = unit @ centres.T
        room_left = [room] * groups
        # Those with most to lose choose first.
        best = likeness.topk(2, dim=1).values
        for i in (best[:, 0] - best[:, 1]).argsort(descending=True).tolist():
            for e in likeness[i].argsort(descending=True).tolist():
                if room_left[e]:
                    assigned[i] = e
                    room_left[e] -= 1
                    break
        centres = F.normalize(torch.stack([unit[assigned == e].sum(0) for e in range(groups)]), dim=1)
    return assigned


def as_mixtral(model: LlamaForCausalLM, recipe: SparseRecipe) -> MixtralForCausalLM:
    """Return the same model in transformers' class."""
    shape = model.config.to_dict()
    shared_fields = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                     "max_position_embeddings", "rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id",
                     "pad_token_id", "tie_word_embeddings", "head_dim")
    sparse = MixtralForCausalLM(MixtralConfig(
        **{key: shape[key] for key in shared_fields}, intermediate_size=recipe.inner, num_local_experts=recipe.experts,
        num_experts_per_tok=recipe.chosen, router_aux_loss_coef=recipe.balance, sliding_window=None))
    weights = {name: value for name, value in model.state_dict().items() if ".mlp." not in name}
    for i, layer in enumerate(model.model.layers):
        mixture, prefix = layer.mlp, f"model.layers.{i}.mlp"
        parts = [part.unflatten(0, (recipe.experts, -1)) for part in (mixture.gate, mixture.up)]
        weights |= {f"{prefix}.gate.weight": mixture.router,
                    f"{prefix}.experts.gate_up_proj": torch.cat(parts, 1),
                    f"{prefix}.experts.down_proj":
                        mixture.down.unflatten(1, (recipe.experts, -1)).transpose(0, 1)}
    sparse.load_state_dict(weights)
    return sparse.eval()


def train_sparse(dense: LlamaForCausalLM, corpus: TokenizedCorpus, recipe: SparseRecipe, work: Path,
                 loop: LoopOptions) -> MixtralForCausalLM:
    """Cut ``dense`` and train it on its own distributions; resumes from ``work``."""
    tokens = torch.from_numpy(np.array(corpus.train))
    model = upcycle(dense, windows(tokens, 512, 0, 16, recipe.seed)[:, :-1], recipe)
    mixtures = [layer.mlp for layer in model.model.layers]

    def micro_loss(rows: Tensor) -> Tensor:
        with torch.no_grad():
            target_probabilities = dense(input_ids=rows[:, :-1], use_cache=False).logits.softmax(-1)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        learned = (logits.logsumexp(-1) - (target_probabilities * logits).sum(-1)).mean()
        balance: Tensor = sum((mixture.balance for mixture in mixtures), torch.zeros(()))
        loss: Tensor = learned + recipe.balance * balance / len(mixtures)
        return loss

    step_loss = compiled(micro_loss, loop.compile)

    def step_value(step: int, _total: int) -> float:
        rows = windows(tokens, recipe.window, step, recipe.tokens_per_step // recipe.window, recipe.seed)
        return backpropagate(step_loss, torch.device("cpu"), recipe.micro_batch // recipe.window, rows)

    def report() -> str:
        balance = sum(float(mixture.balance) for mixture in mixtures) / len(mixtures)
        bits = bits_per_byte(model, corpus, limit=20_000)
        return f"held out {bits:.4f} bits per byte, balance {balance:.3f}"

    optimiser = Optimiser(model, recipe.muon_lr, recipe.adam_lr, recipe.decay_from)
    train(Run("sparse", model, optimiser, recipe.steps, work / "sparse.pt", step_value, report,
              loop.checkpoint_every_s, report_every=50))
    return as_mixtral(model, recipe)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the sparse demonstration model.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the finished model")
    parser.add_argument("--dense", type=Path, default=Path("models/demo"), help="default: models/demo")
    parser.add_argument("--work", type=Path, help="directory of checkpoints; default: OUT.work")
    parser.add_argument("--steps", type=int, default=SparseRecipe.steps)
    args = parser.parse_args()
    recipe = SparseRecipe(steps=args.steps)
    work = args.work or args.out.with_name(args.out.name + ".work")
    try:
        make_directory(args.out)
        make_directory(work)
        dense = load_lm(args.dense / "target")
        tokenizer = Tokenizer.from_file(str(args.dense / "target" / "tokenizer.json"))
        corpus = prepare_for(work, tokenizer, int(dense.config.eos_token_id), recipe.seed)
        make_part(Console(soft_wrap=True), args.out / "target",
                  partial(_target, dense, corpus, recipe, work, args.out))
    except FlowspecError as error:
        print(f"train_sparse: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _target(dense: LlamaForCausalLM, corpus: TokenizedCorpus, recipe: SparseRecipe, work: Path, out: Path,
            directory: Path) -> None:
    model = train_sparse(dense, corpus, recipe, work, LoopOptions(compile=False))  # too short a run to gain
    save_lm(model, corpus, directory)
    facts = {"parameters": sum(p.numel() for p in model.parameters()),
             "bytes": sum(file.stat().st_size for file in directory.iterdir()),
             "experts": recipe.experts, "chosen": recipe.chosen,
             "training_tokens": recipe.steps * recipe.tokens_per_step,
             "held_out_bits_per_byte": round(bits_per_byte(model, corpus, limit=_SAMPLE), 4),
             "dense_bits_per_byte": round(bits_per_byte(dense, corpus, limit=_SAMPLE), 4),
             "held_out_tokens": _SAMPLE}
    (out / "card.toml").write_text(
        'name = "demo-sparse"\nlicence = "Apache-2.0"\n'
        'summary = "a demonstration, trained by us; not for real use"\n\n[target]\n' + toml_table(facts),
        encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
