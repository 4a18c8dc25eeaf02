import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import irframework as ir
from irframework.integrations import transformers as integration
from irframework.integrations.patched_modules import PatchedModule

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2")
ADDS_BEFORE_A_NORM = tuple(family for family in FAMILIES if family != "olmo2")
Tiny = Callable[..., nn.Module]

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients() -> object:
    with torch.no_grad():
        yield


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_stay(tiny: Tiny, ids: Tensor, family: str) -> None:
    model = tiny(family)
    reference = logits(copy.deepcopy(model).double(), ids)
    before = (logits(model, ids).double() - reference).abs().max()
    integration.apply(model)
    after = (logits(model, ids).double() - reference).abs().max()
    assert after < max(2 * before, 2e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_no_further_from_float64(
    tiny: Tiny, ids: Tensor, family: str, dtype: torch.dtype
) -> None:
    model = tiny(family, dtype)
    reference = logits(copy.deepcopy(model).double(), ids)
    before = (logits(model, ids).double() - reference).abs().max()
    integration.apply(model)
    after = (logits(model, ids).double() - reference).abs().max()
    assert after < 1.5 * before


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_mlp_and_rotary_is_replaced(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    norms = sum("RMSNorm" in type(module).__name__ for module in model.modules())
    counts = integration.apply(model).counts()
    assert counts["rms_norm"] == norms
    assert counts["gated_mlp"] == 2
    assert counts["rotary"] == 2


@pytest.mark.parametrize("family", ADDS_BEFORE_A_NORM)
def test_add_and_norm_become_one_op(tiny: Tiny, family: str) -> None:
    assert integration.apply(tiny(family)).counts()["add_norm"] == 2


def test_a_layer_without_a_norm_after_its_add_is_reported(tiny: Tiny) -> None:
    report = integration.apply(tiny("olmo2"))
    assert {(entry.kind, entry.name) for entry in report.skipped} == {
        ("add_norm", "model.layers.0"),
        ("add_norm", "model.layers.1"),
    }
    assert "no norm follows" in report.skipped[0].reason


def test_gemma_uses_the_gated_gelu(tiny: Tiny) -> None:
    report = integration.apply(tiny("gemma3"))
    assert {entry.op for entry in report.replaced if entry.kind == "gated_mlp"} == {"gelu_and_mul"}


@pytest.mark.parametrize("family", FAMILIES)
def test_revert_restores_bit_for_bit(tiny: Tiny, ids: Tensor, family: str) -> None:
    model = tiny(family)
    classes = [type(module) for module in model.modules()]
    parameters = dict(model.named_parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    before = logits(model, ids)
    integration.apply(model)
    integration.revert(model)
    assert [type(module) for module in model.modules()] == classes
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model, ids), before)
    assert not any(key.startswith("ir_") for module in model.modules() for key in module.__dict__)


def test_reverted_projections_have_memory_of_their_own(tiny: Tiny) -> None:
    model = tiny("llama")
    integration.apply(model)
    integration.revert(model)
    mlp = model.model.layers[0].mlp
    for linear in (mlp.gate_proj, mlp.up_proj):
        assert linear.weight.untyped_storage().nbytes() == linear.weight.nbytes


def test_state_dict_keeps_its_names(tiny: Tiny) -> None:
    model = tiny("qwen3")
    names = list(model.state_dict())
    integration.apply(model)
    assert list(model.state_dict()) == names


def test_applying_twice_changes_nothing(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    first = integration.apply(model)
    before = logits(model, ids)
    assert integration.apply(model) == first
    assert torch.equal(logits(model, ids), before)


def test_merging_does_not_double_the_memory(tiny: Tiny) -> None:
    model = tiny("llama")
    integration.apply(model)
    mlp = model.model.layers[0].mlp
    storage = mlp.gate_proj.weight.untyped_storage()
    assert storage.data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()
    assert storage.nbytes() == mlp.gate_proj.weight.nbytes + mlp.up_proj.weight.nbytes


def test_a_deep_copy_is_patched_and_independent(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("gemma2")
    integration.apply(model)
    before = logits(model, ids)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied, ids), before)
    copied.model.layers[0].mlp.gate_proj.weight.zero_()
    assert torch.equal(logits(model, ids), before)
    assert not torch.equal(logits(copied, ids), before)


def test_a_patched_model_can_be_pickled(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("phi3")
    integration.apply(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    integration.revert(loaded)
    assert not any(isinstance(module, PatchedModule) for module in loaded.modules())


def test_torch_save_and_load(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    integration.apply(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False), ids), logits(model, ids))


def test_in_place_updates_of_a_projection_are_seen(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    integration.apply(model)
    model.model.layers[0].mlp.up_proj.weight.mul_(3)
    patched = logits(model, ids)
    integration.revert(model)
    torch.testing.assert_close(patched, logits(model, ids), atol=1e-5, rtol=1e-5)


def test_a_projection_with_new_memory_is_seen(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    integration.apply(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * 3
    patched = logits(model, ids)
    integration.revert(model)
    torch.testing.assert_close(patched, logits(model, ids), atol=1e-5, rtol=1e-5)


def test_an_exchanged_projection_is_seen(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    integration.apply(model)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = nn.Linear(64, 160, bias=False)
    patched = logits(model, ids)
    integration.revert(model)
    torch.testing.assert_close(patched, logits(model, ids), atol=1e-5, rtol=1e-5)


def test_hooks_on_a_projection_run(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    integration.apply(model)
    calls = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    logits(model, ids)
    assert calls == [1]


def test_hooks_on_a_fused_norm_run(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    integration.apply(model)
    calls = []
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: calls.append(1))
    logits(model, ids)
    assert calls == [1]


def test_changing_the_dtype_keeps_the_weights_merged(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    integration.apply(model)
    model.to(torch.bfloat16)
    mlp = model.model.layers[0].mlp
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()
    assert logits(model, ids).dtype == torch.bfloat16


def test_recorded_hidden_states_are_those_of_the_original(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    expected = model(input_ids=ids, output_hidden_states=True).hidden_states
    integration.apply(model)
    actual = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_gradients_reach_every_parameter(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("qwen3")
    with torch.enable_grad():
        model(input_ids=ids, labels=ids).loss.backward()
        expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        integration.apply(model)
        model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


def test_generation_with_a_cache_gives_the_same_tokens(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("smollm3")
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    integration.apply(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), expected)


def test_other_models_of_the_class_are_left_alone(tiny: Tiny) -> None:
    first, second = tiny("llama"), tiny("llama")
    integration.apply(first)
    assert not any(isinstance(module, PatchedModule) for module in second.modules())


def test_a_wrong_implementation_is_not_kept(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    before = logits(model, ids)

    @ir.ops.rms_norm.register_impl("test_wrong")
    def wrong(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        return ir.ops.rms_norm.native(x, weight, epsilon) * 1.01

    try:
        with ir.priority(rms_norm=["test_wrong"]):
            report = integration.apply(model)
    finally:
        ir.ops.rms_norm.unregister_impl("test_wrong")
    assert "rms_norm" not in report.counts()
    assert "add_norm" not in report.counts()
    reasons = [entry.reason for entry in report.skipped if entry.kind == "rms_norm"]
    assert all("differs by" in reason for reason in reasons)
    torch.testing.assert_close(logits(model, ids), before, atol=1e-5, rtol=1e-5)


def test_a_raising_implementation_is_reported_not_raised(tiny: Tiny) -> None:
    model = tiny("llama")

    @ir.ops.silu_and_mul.register_impl("test_raising")
    def raising(x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    try:
        with ir.priority(silu_and_mul=["test_raising"]):
            report = integration.apply(model)
    finally:
        ir.ops.silu_and_mul.unregister_impl("test_raising")
    assert {entry.reason for entry in report.skipped} == {"RuntimeError while trying it: no such kernel"}


def test_tied_projections_are_left_alone(tiny: Tiny) -> None:
    model = tiny("llama")
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.gate_proj.weight = nn.Parameter(first.gate_proj.weight.data)
    report = integration.apply(model)
    assert [entry.name for entry in report.skipped if entry.kind == "gated_mlp"] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    ]


def test_an_unknown_activation_is_left_alone(tiny: Tiny) -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    report = integration.apply(model)
    assert [entry.reason for entry in report.skipped] == ["its activation is neither silu nor gelu"]


def test_a_forward_replaced_on_the_instance_is_left_alone(tiny: Tiny) -> None:
    model = tiny("llama")
    norm = model.model.norm
    norm.forward = norm.forward
    report = integration.apply(model)
    assert [entry.name for entry in report.skipped] == ["model.norm"]


def test_a_model_without_anything_to_replace_gives_an_empty_report() -> None:
    report = integration.apply(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert report.replaced == report.skipped == ()


def test_a_model_on_meta_is_left_alone(tiny: Tiny) -> None:
    model = tiny("llama").to("meta")
    report = integration.apply(model)
    assert report.replaced == ()
    assert {entry.reason for entry in report.skipped} == {"its parameters are on the meta device"}


@pytest.mark.parametrize("function", [integration.apply, integration.revert])
def test_no_module_is_a_type_error(function: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="not on str"):
        function("smollm2")


def test_the_global_generator_is_left_alone(tiny: Tiny) -> None:
    model = tiny("llama")
    state = torch.get_rng_state()
    integration.apply(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_mode_is_kept(tiny: Tiny) -> None:
    model = tiny("llama").train()
    integration.apply(model)
    assert all(module.training for module in model.modules())


def test_the_report_reads_as_a_table_and_as_data(tiny: Tiny) -> None:
    report = integration.apply(tiny("olmo2"))
    assert "fused_add_rms_norm" not in str(report)
    assert "model.layers.0 and 1 more: no norm follows its residual add" in str(report)
    assert report.to_dict()["replaced"][0].keys() == {"name", "kind", "op", "max_error"}


def test_the_compiled_model_agrees(tiny: Tiny, ids: Tensor) -> None:
    model = tiny("llama")
    expected = logits(model, ids)
    integration.apply(model)
    compiled = torch.compile(model, backend="irframework", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected, atol=2e-5, rtol=2e-5)
    assert set(ir.last_report().selected_impls) == {
        "rms_norm",
        "fused_add_rms_norm",
        "silu_and_mul",
        "rotary_embedding",
    }
