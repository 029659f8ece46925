"""Parameter counts of a model: in all, per token, and per rank. Pure arithmetic.

Matrices only: norms and biases are less than a thousandth. A model is its embedding, its layers, and the head, which
may be the embedding again ("tied").
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.model.config_json import Attention, ModelConfig


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of a layer. sharded: cut over tensor ranks. kv: projections of K and V, cut by KV heads. replicated:
    whole on each rank. idle: those of experts that a token is not routed to, a part of `sharded`."""

    sharded: int
    kv: int
    replicated: int
    idle: int

    @property
    def total(self) -> int:
        return self.sharded + self.kv + self.replicated

    @property
    def active(self) -> int:
        """Return the number of parameters that one token is multiplied with."""
        return self.total - self.idle


def layer_parameters(model: ModelConfig, number: int) -> LayerParameters:
    hidden = model.hidden_size
    sharded, kv, replicated = _attention(model.attention, hidden)
    experts = model.experts
    if experts is None or number not in experts.sparse:
        return LayerParameters(sharded + model.mlp_matrices * hidden * model.mlp_size, kv, replicated, 0)
    expert = model.mlp_matrices * hidden * experts.size
    shared = model.mlp_matrices * hidden * experts.shared_size
    router = experts.n * hidden
    idle = (experts.n - experts.per_token) * expert
    return LayerParameters(sharded + experts.n * expert + shared, kv, replicated + router, idle)


def total_parameters(model: ModelConfig) -> int:
    return end_parameters(model) + sum(layer.total for layer in _layers(model, range(model.layers)))


def end_parameters(model: ModelConfig) -> int:
    """Return the parameters of the embedding and the head."""
    return model.vocabulary * model.hidden_size * (1 if model.is_tied else 2)


def active_parameters(model: ModelConfig) -> int:
    """Return the parameters that each token of a prompt is multiplied with, over all layers. The embedding is only
    looked up, and the head is for the last token only."""
    return sum(layer.active for layer in _layers(model, range(model.layers)))


def rank_parameters(model: ModelConfig, stage: range, tensor_size: int) -> float:
    """Return the parameters on each rank of a pipeline stage. KV heads are duplicated where they are fewer than the
    ranks; a tied embedding is on the first stage and on the last."""
    kv_ranks = min(tensor_size, model.attention.kv_heads)
    in_layers = sum(
        layer.sharded / tensor_size + layer.kv / kv_ranks + layer.replicated for layer in _layers(model, stage)
    )
    is_first, is_last = stage.start == 0, stage.stop == model.layers
    ends = is_first + is_last - (is_first and is_last and model.is_tied)
    return in_layers + ends * model.vocabulary * model.hidden_size / tensor_size


def _layers(model: ModelConfig, numbers: range) -> Iterable[LayerParameters]:
    return (layer_parameters(model, number) for number in numbers)


def _attention(shape: Attention, hidden: int) -> tuple[int, int, int]:
    """Return (sharded, kv, replicated) of one layer's attention."""
    output = shape.heads * shape.av_size * hidden
    latent = shape.latent
    if latent is None:
        return hidden * shape.heads * shape.qk_size + output, hidden * shape.kv_heads * (shape.k_size + shape.v_size), 0
    keys_and_values = latent.kv_rank * shape.heads * (shape.qk_size - latent.rope_size + shape.av_size)
    down = hidden * (latent.kv_rank + latent.rope_size + (latent.q_rank or 0))
    queries = (latent.q_rank or hidden) * shape.heads * shape.qk_size
    return queries + keys_and_values + output, 0, down
