"""Checkpoints: shards, GGUF, shares of ranks; and what cannot be loaded is named in one line."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu
from safetensors.torch import load_file, save_file

from octavo.config import engine_config
from octavo.errors import ConfigError, ModelLoadError
from octavo.layers.weights import Weights
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import load_model_config
from octavo.worker.device import Device
from octavo.worker.executor import build_executor
from octavo.worker.loading import pick_dtype

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43] * 4
POOL = {"kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 256}
GGUF_ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


@pytest.fixture
def folder(make_tiny, tmp_path) -> Path:
    """A private copy of a tiny Llama."""
    return Path(shutil.copytree(make_tiny("llama").path, tmp_path / "model"))


def load(path: Path, **settings):
    stages: list[str] = []
    settings = {"dtype": "float32", **POOL, **settings}
    executor = build_executor(engine_config(str(path), settings), path, lambda stage, _: stages.append(stage))
    return executor, stages


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_gguf(path: Path, reference, arch: str) -> None:
    """A tiny model as llama.cpp's converter writes it: names, Llama's permutation, Gemma's norms plus one."""
    config, writer = reference.model.config, gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(9)
    if arch == "gemma3":
        writer.add_rope_freq_base(1_000_000.0)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(GGUF_ARCHS[arch], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, tensor in reference.model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if arch == "llama" and heads:
            half = tensor.shape[0] // heads // 2
            tensor = tensor.reshape(heads, 2, half, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3"])
def test_gguf_gives_the_same_logits_as_safetensors(name, make_tiny, engine_of, tmp_path) -> None:
    tiny, path = make_tiny(name), tmp_path / "tiny.gguf"
    write_gguf(path, tiny.reference, name.partition("_")[0])
    assert torch.equal(engine_of(path, **POOL).logits(PROMPT), engine_of(tiny.path, **POOL).logits(PROMPT))
    assert engine_of(path, **POOL).executor.info.eos_token_ids == (7, 9)


def test_gemma3_gguf_differs_only_by_where_one_is_added_to_norms(make_tiny, engine_of, tmp_path) -> None:
    """A file says nothing of query_pre_attn_scalar: the model's must be its head size."""
    tiny, path = make_tiny("gemma3_plain"), tmp_path / "tiny.gguf"
    write_gguf(path, tiny.reference, "gemma3")
    torch.testing.assert_close(
        engine_of(path, **POOL).logits(PROMPT), tiny.reference.logits(PROMPT), rtol=0, atol=5e-5
    )


def test_sharded_safetensors_give_the_same_logits(make_tiny, engine_of) -> None:
    tiny = make_tiny("llama")
    sharded = make_tiny("llama", shard="40KB")
    assert len(list(sharded.path.glob("*.safetensors"))) > 2
    assert torch.equal(
        engine_of(sharded.path, **POOL).logits(PROMPT), engine_of(tiny.path, **POOL).logits(PROMPT)
    )


def test_stages_come_in_order_and_the_info_is_the_models(folder: Path) -> None:
    edit_config(folder, eos_token_id=[5, 6])
    (folder / "generation_config.json").unlink(missing_ok=True)
    executor, stages = load(folder)
    assert stages == ["loading weights", "sizing the cache", "warming"]
    info = executor.info
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (512, 199, (5, 6))
    assert info.num_blocks == (4 << 20) // info.block_bytes
    assert info.block_bytes >= 2 * 3 * 16 * 2 * 16 * 4  # the kernels may pad it


def test_ranks_hold_shares_that_make_the_whole(make_tiny) -> None:
    def shares(name, shape, dim, world, most_shares=None):
        ranks = [SimpleNamespace(rank=rank, world=world) for rank in range(world)]
        loads = [Weights(checkpoint, torch.float32, torch.device("cpu"), communicator=one) for one in ranks]
        return [weights.tensor(name, shape, dim, most_shares) for weights in loads]

    path = make_tiny("llama").path
    with open_checkpoint(path, load_model_config(path)) as checkpoint:
        for name, shape, dim in (
            ("model.layers.0.self_attn.q_proj.weight", (64, 64), 0),
            ("model.layers.0.mlp.down_proj.weight", (64, 96), 1),
        ):
            whole = checkpoint.read(name, torch.float32)
            halves, unequal = shares(name, shape, dim, 2), shares(name, shape, dim, 5)
            assert torch.equal(torch.cat(halves, dim), whole) and halves[0].shape == halves[1].shape
            assert torch.equal(torch.cat(unequal, dim), whole)
            first, again, second, last = shares(name, shape, dim, 4, most_shares=2)
            assert torch.equal(first, halves[0]) and torch.equal(again, halves[0])
            assert torch.equal(second, halves[1]) and torch.equal(last, halves[1])


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_unexpected_tensors_are_named(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.ones(2)}))
    with pytest.raises(ModelLoadError, match=r"1 unexpected tensors: model\.layers\.0\.extra\.weight"):
        load(folder)


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(64, 60)}))
    with pytest.raises(ModelLoadError, match=r"layers\.2\.self_attn\.o_proj.*\(64, 60\).*\(64, 64\)"):
        load(folder)


def test_weights_in_eight_bits_are_refused_by_name(folder: Path) -> None:
    name = "model.norm.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight.*int8"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"'MambaForCausalLM'.*LlamaForCausalLM, Qwen3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'.*linear"),
        ({"hidden_act": "relu"}, "activation 'relu'.*silu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}},
            "'compressed-tensors'",
        ),
        ({"hidden_size": None}, "hidden_size"),
    ],
)  # fmt: skip
def test_configs_that_ask_for_more_are_refused_by_name(folder: Path, changes, message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=message) as error:
        load(folder)
    assert "\n" not in error.value.message


def test_a_shard_that_is_missing_or_cut_is_named(make_tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_tiny("llama", shard="40KB").path, tmp_path / "model"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-500])
    with pytest.raises(ModelLoadError, match=shard.name):
        load(folder)
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"lacks {shard.name}"):
        load(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model folder: it has no config\.json"):
        load(tmp_path)


def test_other_gguf_types_and_architectures_are_refused_by_name(make_tiny, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny("llama").reference, "llama")
    raw = path.read_bytes()
    at = raw.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 16
    path.write_bytes(raw[:at] + (10).to_bytes(4, "little") + raw[at + 4 :])  # 10: Q2_K
    with pytest.raises(ModelLoadError, match=r"Q2_K.*Q4_0, Q4_1"):
        load(path)
    path.write_bytes(raw.replace(b"llama", b"mamba"))
    with pytest.raises(ModelLoadError, match=r"'mamba'.*llama, qwen3, gemma3"):
        load(path)


def test_lengths_and_pools_that_do_not_fit_are_refused(folder: Path) -> None:
    block = load(folder)[0].info.block_bytes
    with pytest.raises(ConfigError, match="longest that fits is 160"):
        load(folder, kv_cache_memory_bytes=10 * block, max_model_len=500)
    with pytest.raises(ConfigError, match=r"513.*limit of 512"):
        load(folder, max_model_len=513)
    executor, _ = load(folder, kv_cache_memory_bytes=10 * block, max_model_len="auto")
    assert executor.info.max_model_len == 160


@pytest.mark.parametrize("block_size", [1, 8, 20, 16])
@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_the_pool_takes_the_bytes_that_it_was_given(folder: Path, block_size: int, kept: str) -> None:
    executor, _ = load(folder, block_size=block_size, kv_cache_dtype=kept, max_model_len=16)
    taken = sum(tensor.nbytes for tensor in executor.runner.pages.tensors)
    assert taken == (executor.info.num_blocks + 1) * executor.info.block_bytes  # one is the page of zeros
    assert 0 <= (4 << 20) - (taken - executor.info.block_bytes) < executor.info.block_bytes


def test_without_a_size_the_pool_is_what_all_sequences_could_use(folder: Path) -> None:
    executor, _ = load(folder, kv_cache_memory_bytes=None, max_num_seqs=3)
    assert executor.info.num_blocks == 3 * 512 // 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"can use no GPU here: .*--device cpu"):
        load(folder, device="cuda")


def test_auto_is_the_checkpoints_dtype_but_not_float16_on_a_cpu() -> None:
    cpu, cuda = Device(), FakeGpu()
    assert pick_dtype("auto", "float32", cpu) is torch.float32
    assert pick_dtype("auto", "bfloat16", cpu) is torch.bfloat16
    assert pick_dtype("auto", "float16", cpu) is torch.bfloat16
    assert pick_dtype("auto", "float16", cuda) is torch.float16
    assert pick_dtype("float16", "bfloat16", cpu) is torch.float16
