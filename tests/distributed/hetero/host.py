"""A tiny multimodal host: an image encoder (tensor and context parallel) in front of Megatron's GPT, and its data."""

import hashlib
import types

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_autoparallel.runtime.attention.context_parallel import ContextParallelAttention, gather_rows, use_in_spec
from mindspeed_autoparallel.runtime.attention.shards import packed_positions, zigzag_positions
from mindspeed_autoparallel.runtime.hetero.adapters.protocol import LocalItem

VOCABULARY, HIDDEN, SEQUENCE, PATCH, IMAGE = 64, 32, 16, 12, 0


def samples(count, text_only=()):
    """Samples with 0 to 2 images of 1 to 5 patches; one token per patch, the image token marks them."""
    generator = torch.Generator().manual_seed(3)
    pattern = [[3], [], [1], [5, 2], [2], [], [4], [1, 1]]
    found = []
    for i in range(count):
        images = [] if i in text_only else pattern[i % len(pattern)]
        rows = sum(images)
        ids = torch.randint(1, VOCABULARY, (SEQUENCE,), generator=generator)
        ids[2 : 2 + rows] = IMAGE
        labels = torch.randint(0, VOCABULARY, (SEQUENCE,), generator=generator)
        pixels = torch.randn(rows, PATCH, generator=generator)
        found.append({"index": i, "ids": ids, "labels": labels, "pixels": pixels, "images": images})
    return found


def batches(data, num_microbatches, micro_batch_size, replica, num_replicas):
    """Microbatch m of replica d holds the samples from (m * replicas + d) * size on, in every layout."""
    for m in range(num_microbatches):
        first = (m * num_replicas + replica) * micro_batch_size
        yield data[first : first + micro_batch_size]


def config(
    layers,
    *,
    tensor=1,
    pipeline=1,
    context=1,
    sequence=False,
    per_token=False,
    virtual=None,
    recompute=None,
    dtype=torch.float32,
    dropout=0.0,
):
    return TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        attention_dropout=0.0,
        hidden_dropout=dropout,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        sequence_parallel=sequence and tensor > 1,
        calculate_per_token_loss=per_token,
        deallocate_pipeline_outputs=False,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        **(recompute or {}),
    )


PARTS = {1: ("wide narrow keys mix",), 2: ("wide narrow", "keys mix"), 4: ("wide", "narrow", "keys", "mix")}
"""Of the encoder, by stage of its own pipeline."""


class ImageEncoder(MegatronModule):
    """A tensor-parallel perceptron, then attention inside each image over the context-parallel ranks."""

    def __init__(self, cfg):
        super().__init__(cfg)
        stages = PARTS[mpu.get_pipeline_model_parallel_world_size() if cfg.pipeline_model_parallel_size > 1 else 1]
        self.parts = stages[mpu.get_pipeline_model_parallel_rank() if len(stages) > 1 else 0].split()
        common = {"config": cfg, "init_method": cfg.init_method, "bias": True, "skip_bias_add": False}
        if "wide" in self.parts:
            self.fc1 = tensor_parallel.ColumnParallelLinear(PATCH, 4 * HIDDEN, gather_output=False, **common)
        if "narrow" in self.parts:
            self.fc2 = tensor_parallel.RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, **common)
        if "keys" in self.parts:
            self.query = tensor_parallel.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False, **common)
            # A key bias has no gradient (softmax ignores it): Adam would follow rounding noise.
            self.key = tensor_parallel.ColumnParallelLinear(
                HIDDEN, HIDDEN, gather_output=False, **{**common, "bias": False}
            )
            self.value = tensor_parallel.ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False, **common)
        if "mix" in self.parts:
            self.out = tensor_parallel.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, **common)
            self.attention = ContextParallelAttention(cfg, 1, AttnMaskType.no_mask)
        self.heads = 4 // mpu.get_tensor_model_parallel_world_size()

    def forward(self, x, sizes):
        """Pixels on the first stage, ``[rows, 1, width]`` after it; likewise the result before the last stage."""
        boundaries = [0]
        for size in sizes:
            boundaries.append(boundaries[-1] + size)
        size, rank, group = (
            mpu.get_context_parallel_world_size(),
            mpu.get_context_parallel_rank(),
            mpu.get_context_parallel_group(),
        )
        held = [packed_positions(boundaries, size, r, causal=False) for r in range(size)]
        x = x[held[rank]] if "wide" in self.parts else x[:, 0]
        if "wide" in self.parts:
            x = torch.nn.functional.gelu(self.fc1(x)[0])
        if "narrow" in self.parts:
            x = torch.nn.functional.dropout(self.fc2(x)[0], self.config.hidden_dropout, self.training)
        if "keys" in self.parts:
            x = torch.cat([x, *(f(x)[0] for f in (self.query, self.key, self.value))], dim=1)
        if "mix" not in self.parts:
            return x.unsqueeze(1)
        x, *qkv = x.split([HIDDEN, *[self.heads * HIDDEN // 4] * 3], dim=1)
        q, k, v = (part.reshape(x.shape[0], self.heads, HIDDEN // 4) for part in qkv)
        packed = types.SimpleNamespace(cu_seqlens_q=torch.tensor(boundaries), cu_seqlens_q_padded=None)
        x = x + self.out(self.attention(q, k, v, None, packed_seq_params=packed))[0]
        if size > 1:
            order = torch.argsort(torch.tensor([p for rows in held for p in rows]))
            x = gather_rows(x, [len(rows) for rows in held], group, sum_backward=False)[order]
        return x


class ImageGenerator(MegatronModule):
    """A tensor-parallel perceptron from the decoder's rows at the image tokens to the pixels, and its losses."""

    def __init__(self, cfg):
        super().__init__(cfg)
        common = {"config": cfg, "init_method": cfg.init_method, "bias": True, "skip_bias_add": False}
        self.fc1 = tensor_parallel.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **common)
        self.fc2 = tensor_parallel.RowParallelLinear(4 * HIDDEN, PATCH, input_is_parallel=True, **common)

    def forward(self, rows, targets):
        told = self.fc2(torch.nn.functional.gelu(self.fc1(rows)[0]))[0]
        return (told - targets).float().square().mean(dim=1)


class VisionLanguageModel(MegatronModule):
    """``image_encoder``, ``text_decoder`` and ``image_generator`` as hosts name them."""

    def __init__(self, encoder, cfg, *, pre, post, vp_stage=None, generator=None):
        super().__init__(cfg)
        self.hidden = []
        self.pre_process, self.post_process, self.share_embeddings_and_output_weights = pre, post, False
        if encoder is not None:
            self.image_encoder = encoder
        extra = {} if vp_stage is None else {"vp_stage": vp_stage}
        self.text_decoder = GPTModel(
            cfg,
            use_in_spec(get_gpt_layer_local_spec()),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=pre,
            post_process=post,
            share_embeddings_and_output_weights=False,
            scatter_embedding_sequence_parallel=False,
            **extra,
        )
        self.vp_stage = vp_stage
        self.generates = generator is not None and post
        if generator is not None:
            self.image_generator = generator
        if self.generates:
            self.text_decoder.decoder.register_forward_hook(lambda module, given, output: self.hidden.append(output))

    def set_input_tensor(self, tensor):
        self.text_decoder.set_input_tensor(tensor)

    def forward(self, batch):
        ids, labels = (torch.stack([s[key] for s in batch]) for key in ("ids", "labels"))
        positions = torch.arange(SEQUENCE).expand_as(ids)
        mine = zigzag_positions(SEQUENCE, mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank())
        embeddings = None
        if self.pre_process:
            embeddings = self.text_decoder.embedding(input_ids=ids, position_ids=positions).transpose(0, 1)
            sizes = [n for s in batch for n in s["images"]]
            if sizes:
                rows = self.image_encoder(torch.cat([s["pixels"] for s in batch]), sizes)
                embeddings = embeddings.masked_scatter((ids == IMAGE).unsqueeze(-1), rows.to(embeddings.dtype))
            embeddings = embeddings.transpose(0, 1)[mine].contiguous()
            if self.config.sequence_parallel:
                embeddings = tensor_parallel.scatter_to_sequence_parallel_region(embeddings)
        output = self.text_decoder(
            ids[:, mine], positions[:, mine], None, decoder_input=embeddings, labels=labels[:, mine]
        )
        if not self.generates:
            return output
        own = (ids == IMAGE)[:, mine]
        if self.config.sequence_parallel:
            size = mpu.get_tensor_model_parallel_world_size()
            own = own.chunk(size, dim=1)[mpu.get_tensor_model_parallel_rank()]
        rows = self.hidden.pop().transpose(0, 1)[own]
        return output, self.image_generator(rows, torch.cat([s["pixels"] for s in batch]))


def forward_step(losses, per_token=False):
    def step(iterator, model):
        batch = next(iterator)
        output = model(batch)

        def loss_function(per_token_loss, *args, **kwargs):
            generated = 0.0
            if isinstance(per_token_loss, tuple):
                per_token_loss, generated = per_token_loss[0], 0.5 * per_token_loss[1].sum()
            total = per_token_loss.float().sum() if per_token_loss.dtype != torch.float64 else per_token_loss.sum()
            count = len(batch) * SEQUENCE
            losses.append(total.item() / count)
            total = total + generated
            if per_token:
                local = torch.tensor(per_token_loss.numel(), dtype=torch.int)
                return total, local, {"loss": torch.stack([total.detach(), local.to(total.dtype)])}
            return total / count, {"loss": total.detach() / count}

        return output, loss_function

    return step


class ImageAdapter:
    input_shape, output_shape, meta_size = (PATCH,), (HIDDEN,), 0

    def __init__(self, dtype, module):
        self.input_dtype = self.output_dtype = dtype

    def items(self, batch):
        return [
            # The image tokens of a sample begin at its second token, one image after another.
            LocalItem(s["index"], n, n, float(n + n * n), (), 2 + sum(s["images"][:k]), SEQUENCE)
            for s in batch
            for k, n in enumerate(s["images"])
        ]

    def rows(self, batch):
        return torch.cat([s["pixels"] for s in batch])

    def encode(self, module, rows, items):
        return module(rows, [item.input_rows for item in items])

    def encode_later_stage(self, module, hidden, items):
        return self.encode(module, hidden, items)

    def dummy(self):
        return torch.zeros(1, PATCH, dtype=self.input_dtype), [LocalItem(0, 1, 1, 1.0)]

    def embeddings(self, rows):
        return rows


class GeneratorAdapter(ImageAdapter):
    """Targets are the pixels, rows those of the decoder at the image tokens."""

    def generate(self, module, hidden, targets, items):
        return module(hidden, targets)

    def dummy(self):
        rows, items = super().dummy()
        return torch.zeros(1, HIDDEN, dtype=self.output_dtype), rows, items


def fill(module, *, tensor, rank, layer_offset=0, prefix=""):
    """Weights by global name, then this rank's slice; the same model in every layout."""
    for name, parameter in module.named_parameters():
        parts = (prefix + name).split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(int(parts[at]) + layer_offset)
        key = ".".join(parts)
        dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        if dim >= 0:
            shape[dim] *= tensor
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
        full = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2
        if "norm" in key and "weight" in key:
            full += 1.0
        with torch.no_grad():
            parameter.copy_(full.chunk(tensor, dim)[rank] if dim >= 0 else full)
        parameter.global_name = key
