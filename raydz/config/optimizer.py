"""`optimizer`: one section a type, each with the parameters and defaults that DeepSpeed or torch give it.

Layer 1. `engine.EngineSections` has the union; `raydz.optim.build_optimizer` takes type and parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from raydz.config.section import FractionPair, NonNegative, Positive, Section

_NAMES = ("Adam", "AdamW", "SGD", "Lion", "Muon", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop")
_SPELLINGS = {name.lower(): name for name in _NAMES}
_spelled = BeforeValidator(lambda value: _SPELLINGS.get(value.lower(), value) if isinstance(value, str) else value)
_Share = Annotated[float, Field(ge=0, le=1)]


class OptimizerParams(Section):
    """Arguments of AdamW."""

    lr: NonNegative = 1e-3
    betas: FractionPair = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    adam_w_mode: bool = True
    bias_correction: bool = True


class OptimizerConfig(Section):
    """`optimizer` of type Adam or AdamW; without one, AdamW with these defaults."""

    type: Annotated[Literal["Adam", "AdamW"], _spelled] = "AdamW"
    params: OptimizerParams = OptimizerParams()

    @property
    def is_decoupled(self) -> bool:
        """Whether weight decay is AdamW's: as in DeepSpeed, type Adam too unless `adam_w_mode` is false."""
        return self.type == "AdamW" or self.params.adam_w_mode


class SGDParams(Section):
    """As torch.optim.SGD's."""

    lr: NonNegative = 1e-3
    momentum: NonNegative = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0


class SGDConfig(Section):
    """`optimizer` of type SGD."""

    type: Annotated[Literal["SGD"], _spelled]
    params: SGDParams = SGDParams()


class LionParams(Section):
    """As DeepSpeed's FusedLion's."""

    lr: NonNegative = 1e-3
    betas: FractionPair = (0.9, 0.99)
    weight_decay: NonNegative = 0.0


class LionConfig(Section):
    """`optimizer` of type Lion."""

    type: Annotated[Literal["Lion"], _spelled]
    params: LionParams = LionParams()


class MuonParams(Section):
    """As DeepSpeed's: Muon for matrices inside blocks, AdamW (`betas`, `eps`) for the rest."""

    lr: NonNegative = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    nesterov: bool = True
    weight_decay: NonNegative = 0.0
    muon_lr: NonNegative | None = None
    """Rate of the matrices, None: lr. Scales with the schedule as lr does."""
    adam_lr: NonNegative | None = None
    """Rate of the rest, None: lr."""
    ns_method: Literal["gram", "standard"] = "gram"
    ns_steps: Positive = 5
    betas: FractionPair = (0.9, 0.95)
    eps: NonNegative = 1e-10


class MuonConfig(Section):
    """`optimizer` of type Muon."""

    type: Annotated[Literal["Muon"], _spelled]
    params: MuonParams = MuonParams()


class AdadeltaParams(Section):
    """As torch.optim.Adadelta's."""

    lr: NonNegative = 1.0
    rho: _Share = 0.9
    eps: NonNegative = 1e-6
    weight_decay: NonNegative = 0.0


class AdadeltaConfig(Section):
    """`optimizer` of type Adadelta."""

    type: Annotated[Literal["Adadelta"], _spelled]
    params: AdadeltaParams = AdadeltaParams()


class AdagradParams(Section):
    """As DeepSpeed's and torch.optim.Adagrad's."""

    lr: NonNegative = 1e-2
    lr_decay: NonNegative = 0.0
    eps: NonNegative = 1e-10
    weight_decay: NonNegative = 0.0


class AdagradConfig(Section):
    """`optimizer` of type Adagrad."""

    type: Annotated[Literal["Adagrad"], _spelled]
    params: AdagradParams = AdagradParams()


class AdamaxParams(Section):
    """As torch.optim.Adamax's."""

    lr: NonNegative = 2e-3
    betas: FractionPair = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0


class AdamaxConfig(Section):
    """`optimizer` of type Adamax."""

    type: Annotated[Literal["Adamax"], _spelled]
    params: AdamaxParams = AdamaxParams()


class NAdamParams(Section):
    """As torch.optim.NAdam's."""

    lr: NonNegative = 2e-3
    betas: FractionPair = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    momentum_decay: NonNegative = 4e-3
    decoupled_weight_decay: bool = False


class NAdamConfig(Section):
    """`optimizer` of type NAdam."""

    type: Annotated[Literal["NAdam"], _spelled]
    params: NAdamParams = NAdamParams()


class RAdamParams(Section):
    """As torch.optim.RAdam's."""

    lr: NonNegative = 1e-3
    betas: FractionPair = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    decoupled_weight_decay: bool = False


class RAdamConfig(Section):
    """`optimizer` of type RAdam."""

    type: Annotated[Literal["RAdam"], _spelled]
    params: RAdamParams = RAdamParams()


class RMSpropParams(Section):
    """As torch.optim.RMSprop's."""

    lr: NonNegative = 1e-2
    alpha: _Share = 0.99
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    momentum: NonNegative = 0.0
    centered: bool = False


class RMSpropConfig(Section):
    """`optimizer` of type RMSprop."""

    type: Annotated[Literal["RMSprop"], _spelled]
    params: RMSpropParams = RMSpropParams()


def _tag(value: Any) -> str:
    kind = value.get("type", "AdamW") if isinstance(value, Mapping) else getattr(value, "type", "AdamW")
    name = _SPELLINGS.get(kind.lower(), kind) if isinstance(kind, str) else "AdamW"
    return "AdamW" if name == "Adam" else name


AnyOptimizerConfig = Annotated[
    Annotated[OptimizerConfig, Tag("AdamW")]
    | Annotated[SGDConfig, Tag("SGD")]
    | Annotated[LionConfig, Tag("Lion")]
    | Annotated[MuonConfig, Tag("Muon")]
    | Annotated[AdadeltaConfig, Tag("Adadelta")]
    | Annotated[AdagradConfig, Tag("Adagrad")]
    | Annotated[AdamaxConfig, Tag("Adamax")]
    | Annotated[NAdamConfig, Tag("NAdam")]
    | Annotated[RAdamConfig, Tag("RAdam")]
    | Annotated[RMSpropConfig, Tag("RMSprop")],
    Discriminator(_tag),
]
