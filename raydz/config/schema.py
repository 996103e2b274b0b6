"""A run's configuration: raydz's own sections beside DeepSpeed's.

Layer 1. `load` makes a `Config` from a file, dict or overrides; `orchestrate.fit`, `train.loop`, `data.prepare` and
`checkpoint` read their sections; `Config.engine()` is what the engine sees.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from raydz.config.batch import BatchSize
from raydz.config.cluster import FailureConfig, ScalingConfig
from raydz.config.engine import EngineConfig, EngineSections, Recomputation
from raydz.config.faults import Fault, Unfit
from raydz.config.resolve import to_yaml
from raydz.config.section import (
    AboveZero,
    Count,
    FolderName,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Text,
    Whole,
)  # fmt: skip

Auto = Literal["auto"]


class RunConfig(Section):
    """`run`: the identity of a run over restarts."""

    name: FolderName | None = None
    """Folder and MLflow run; None: `<file>-<hash of what decides the result>`, filled by `load`."""
    root: str = "runs"
    """Local folder of all runs."""
    seed: Whole = 0

    @model_validator(mode="after")
    def _local_root(self) -> RunConfig:
        if "://" in self.root:
            raise Unfit(Fault("root", "must be a local folder", got=self.root, remedy="checkpoint.dir may be s3://"))
        return self


class ModelConfig(Section):
    """`model`, in Hugging Face's names."""

    kind: Literal["llama"] = "llama"
    vocab_size: Positive | Auto = "auto"
    """auto: `data.tokenizer.vocab_size`, or what the tokenizer of `data.tokenizer.path` has."""
    hidden_size: Positive = 256
    num_hidden_layers: Positive = 4
    num_attention_heads: Positive = 4
    num_key_value_heads: Positive | None = None
    """None: as many as attention heads."""
    intermediate_size: Positive | Auto = "auto"
    """auto: 8/3 of the hidden size, up to the next multiple of 64."""
    rope_theta: AboveZero = 10000.0
    rms_norm_eps: AboveZero = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: AboveZero = 0.02
    init_from: Text | None = None
    """Weights to begin with: a Hugging Face folder or a raydz checkpoint, local or `s3://`; None: new ones."""
    max_position_embeddings: Positive | Auto = "auto"
    """auto: `data.sequence_length`."""
    activation_checkpointing: Recomputation = "none"
    compile: bool = False
    """torch.compile the blocks' training."""
    compile_backend: Text = "inductor"

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelConfig:
        faults, heads = [], self.num_attention_heads
        if self.hidden_size % heads:
            wanted = f"a divisor of hidden_size {self.hidden_size}"
            faults.append(Fault("num_attention_heads", "heads do not divide the width", got=str(heads), wanted=wanted))
        elif self.hidden_size // heads % 2:
            got = f"hidden_size {self.hidden_size} / num_attention_heads {heads} = {self.hidden_size // heads}"
            faults.append(Fault("num_attention_heads", "a head's width must be even (rotary embedding)", got=got))
        if self.num_key_value_heads and heads % self.num_key_value_heads:
            wanted = f"a divisor of num_attention_heads {heads}"
            got = str(self.num_key_value_heads)
            faults.append(Fault("num_key_value_heads", "heads do not share key-value heads evenly", got, wanted))
        if faults:
            raise Unfit(*faults)
        return self


def _as_source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


class SourceConfig(Section):
    """One source of text; a plain string is its path."""

    path: Text
    """File, folder, glob, `s3://` URI or `sample:<name>`."""
    column: str = "text"
    split: Literal["lines", "file", "blank_lines"] = "lines"
    """What one document of a plain-text file is."""


Sources = Annotated[list[Annotated[SourceConfig, BeforeValidator(_as_source)]], BeforeValidator(_as_list)]


class TokenizerConfig(Section):
    """`data.tokenizer`: a given `tokenizer.json`, or one that is trained on the data."""

    path: str | None = None
    vocab_size: Annotated[Whole, Field(ge=257)] = 2048


class DataConfig(Section):
    """`data`."""

    sources: Sources = Field(default_factory=list)
    evals: dict[str, Sources] = Field(default_factory=dict)
    """Further evaluation sets by name."""
    eval_fraction: Fraction = 0.02
    """Share of documents held out from `sources`."""
    sequence_length: Positive = 128
    tokenizer: TokenizerConfig = TokenizerConfig()
    cache_dir: str | None = None
    """Where token shards are kept; None: `<run.root>/cache`."""


class LossSpikeConfig(Section):
    """`train.loss_spike`: a step whose loss stands out from those before it."""

    rule: Literal["median", "zscore"] = "median"
    """What `threshold` counts: times the window's median, or standard deviations above its mean."""
    threshold: AboveZero = 2.0
    window: Annotated[Positive, Field(ge=2)] = 50
    """Steps to compare with; nothing is a spike before there are so many."""
    action: Literal["warn", "skip", "rewind"] = "warn"
    """skip: drop the step's update; rewind: also go back to the newest checkpoint's weights."""
    max_in_row: Positive = 20
    """So many skipped or rewound steps in a row end the training."""


class TrainConfig(Section):
    """`train`. Units: `*_every` and `steps` count optimizer steps; 0 turns a habit off."""

    steps: Positive = 100
    eval_every: Count = 50
    eval_rows: Positive = 64
    log_every: Positive = 1
    sample_prompt: str | None = None
    sample_tokens: Positive = 40
    max_skipped_in_row: Positive = 20
    ema_decay: Fraction | None = None
    """Keep a moving average of the weights, which checkpoints hold as the kind `ema`; None: none."""
    evaluate_ema: bool = False
    """Evaluate and sample with the average in the weights' place."""
    loss_spike: LossSpikeConfig | None = None
    loss_chunk_tokens: Count | Auto = "auto"
    """Tokens whose logits exist at a time; 0: all; auto: as many as the hidden size, 2048 at most."""
    threads: Positive | Auto = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"


class KeepBestConfig(Section):
    """`checkpoint.keep_best`: checkpoints kept for a metric that they were saved with, of the same value the oldest."""

    metric: Text
    """For example `eval_loss`."""
    mode: Literal["min", "max"] = "min"
    count: Positive = 1


class CheckpointConfig(Section):
    """`checkpoint`."""

    dir: str | None = None
    """Local folder or `s3://` URI; None: `run.root`."""
    every: Count = 50
    """0: only at the end."""
    at_end: bool = True
    export_every: Count = 0
    """Every n-th save also becomes a merged Hugging Face folder in `<run>/exports`, and the last one; 0: none."""
    export_dtype: Auto | Literal["float32", "bfloat16", "float16"] = "auto"
    """Of its weights; auto: what the run computes in."""
    export_shard_bytes: Positive = 5_000_000_000
    """Of one of its files at most."""
    async_save: bool = True
    """Copy the state to host memory (each rank as much as it has on disk) and write it while training goes on."""
    in_flight: Literal["wait", "skip"] = "wait"
    """What a save does while the one before it is under way; the last one waits."""
    max_failures_in_row: Positive = 3
    """So many saves in a row that fail end the training."""
    timeout_s: AboveZero = 1800.0
    """How long the ranks of a save wait for each other before it has failed."""
    exit_wait_s: NonNegative = 25.0
    """How long a run that fails or is told to end waits for the save in flight."""
    keep_last: Positive | None = None
    """So many of the newest whole checkpoints are kept, and what the next two keys name; None: all."""
    keep_every: Count = 0
    """Steps: checkpoints whose step is a multiple of it are kept for ever; 0: none."""
    keep_best: KeepBestConfig | None = None
    sweep_after_s: AboveZero | None = 86400.0
    """Age from which files of saves that were never committed are removed; None: never. Longer than any save takes."""

    @property
    def saves_behind(self) -> bool:
        """Whether a run makes copies of its state in host memory to save from."""
        return self.async_save and bool(self.every or self.at_end)

    @model_validator(mode="after")
    def _keeping_fits(self) -> CheckpointConfig:
        if self.keep_last is None and (self.keep_every or self.keep_best):
            which = "keep_every" if self.keep_every else "keep_best"
            what = "has no effect while all checkpoints are kept"
            raise Unfit(Fault(which, what, remedy="set keep_last, the number of newest checkpoints to keep besides"))
        if self.sweep_after_s is not None and self.sweep_after_s <= self.timeout_s:
            what = "would sweep away the files of a save that is under way"
            raise Unfit(Fault("sweep_after_s", what, str(self.sweep_after_s), f"more than timeout_s {self.timeout_s}"))
        return self


class StorageConfig(Section):
    """`storage`: how `s3://` paths are reached. Credentials come from the environment alone."""

    endpoint_url: str | None = None
    region: str | None = None
    path_style: Auto | bool = "auto"
    profile: str | None = None
    checksum: Literal["auto", "crc64nvme", "crc32c", "crc32", "off"] = "auto"
    concurrency: Positive = 8
    """Requests in flight of one writer or one large read."""
    bandwidth_limit: AboveZero | None = None
    """Bytes per second of each rank, up and down together; None: no limit."""
    part_bytes_min: Positive = 16 << 20
    part_bytes_max: Positive = 64 << 20
    """Bounds for the parts of an upload, 5 MiB to 5 GiB."""
    read_back: Auto | bool = "auto"
    """Read and compare all that was written; auto: if the self-test finds that the store does not check checksums."""
    conditional_put: Literal["require", "warn"] = "require"
    """What to do with a store that ignores `If-None-Match`: refuse it, or warn and look before each commit."""
    sse: str | None = None
    """Server-side encryption: AES256 or aws:kms."""
    sse_kms_key_id: str | None = None
    connect_timeout_s: AboveZero = 10.0
    read_timeout_s: AboveZero = 60.0
    max_attempts: Positive = 10
    """Tries of one request."""


class TrackingConfig(Section):
    """`tracking`."""

    mlflow: bool = True
    mlflow_uri: str | None = None
    """None: `sqlite:///<run.root>/mlflow.db`."""
    experiment: Text = "raydz"
    log_json: bool = False
    """Log in JSON, a line a record and one an event of `events.jsonl`."""


class Config(EngineSections):
    """A run. Made by `load`, which fills what is derived; frozen after that."""

    run: RunConfig = RunConfig()
    resume: Text = "auto"
    """auto: from the newest checkpoint of `run.name`; never; or a checkpoint's URI."""
    resume_key_map: Text | None = None
    """JSON file with the model's names for those of the checkpoint that `resume` names, read on rank 0's host."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    storage: StorageConfig = StorageConfig()
    scaling: ScalingConfig = ScalingConfig()
    failure: FailureConfig = FailureConfig()
    tracking: TrackingConfig = TrackingConfig()

    _given: dict[str, Any] | None = PrivateAttr(None)
    """What the user gave, so that overrides apply before anything is derived."""
    _stem: str = PrivateAttr("run")

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        faults, data, positions = [], self.data, self.model.max_position_embeddings
        if positions != "auto" and positions < data.sequence_length:
            wanted = f"at least data.sequence_length {data.sequence_length}"
            what = "rows are longer than the model's positions"
            faults.append(Fault("model.max_position_embeddings", what, str(positions), wanted))
        if self.train.eval_every and data.sources and not data.evals and not data.eval_fraction:
            remedy = "set data.eval_fraction or data.evals, or train.eval_every to 0"
            faults.append(Fault("train.eval_every", "there is nothing to evaluate on", remedy=remedy))
        if self.train.evaluate_ema and self.train.ema_decay is None:
            remedy = "set train.ema_decay, for example to 0.999"
            faults.append(Fault("train.evaluate_ema", "there is no average of the weights", remedy=remedy))
        if self.scaling.is_elastic:
            faults += _faults_of_elastic_batch(self)
        if faults:
            raise Unfit(*faults)
        return self

    @property
    def given(self) -> dict[str, Any]:
        """What the user wrote, with overrides, before anything was derived."""
        return self.model_dump(exclude_unset=True) if self._given is None else self._given

    def engine(self) -> EngineConfig:
        """What the engine sees of this run."""
        shared = {name: getattr(self, name) for name in EngineSections.model_fields}
        engine = EngineConfig(**shared, seed=self.run.seed)
        engine._most_ranks = self.scaling.max_workers if self.scaling.is_elastic else None
        return engine

    def batch(self, world_size: int) -> BatchSize:
        """As of the engine; with elastic workers the global batch stays, whatever their number."""
        return self.engine().batch(world_size)

    def to_yaml(self) -> str:
        """The resolved configuration as text that `load` reads back."""
        return to_yaml(self)


def _faults_of_elastic_batch(config: Config) -> list[Fault]:
    """With a range of workers only the batch of the whole step can stay the same; its cut follows their number."""
    faults, most = [], config.scaling.max_workers
    if config.train_batch_size is None:
        rows = (config.train_micro_batch_size_per_gpu or 1) * (config.gradient_accumulation_steps or 1) * most
        remedy = f"set it to the rows of one step over all workers ({most} workers would have {rows})"
        what = "scaling.num_workers is a range, and the batch is not given for all workers together"
        faults.append(Fault("train_batch_size", what, remedy=remedy))
    if config.gradient_accumulation_steps is not None:
        remedy = "leave it out and set train_micro_batch_size_per_gpu, the rows that a worker takes at once"
        what = "scaling.num_workers is a range, and accumulation follows the number of workers"
        got = str(config.gradient_accumulation_steps)
        faults.append(Fault("gradient_accumulation_steps", what, got, remedy=remedy))
    return faults
