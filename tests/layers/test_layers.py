"""Layers over ops: each against torch's or transformers' module of its kind, whole, compiled and on two processes."""

import copy
import pickle

import pytest
import torch
from layer_cases import BUILD, gradients, result_of, run_and_train
from layer_references import REFERENCES, reference
from two_processes import run_in_processes

from irframework import layers

pytestmark = pytest.mark.usefixtures("seeded")


EVERY_LAYER = pytest.mark.parametrize("name", REFERENCES)
WHOLE = (
    "RMSNorm",
    "RMSNorm with a residual",
    "GemmaRMSNorm",
    "RotaryEmbedding",
    "ReplicatedLinear",
    "Conv2d",
    "Conv3d",
)
ON_TWO_COMPILED = tuple(name for name in REFERENCES if name not in WHOLE)  # what is divided


def loaded(name):
    layer = BUILD[name](None)
    layers.load_full(layer, reference(name)[0])
    return layer


def called(layer, name):
    return result_of(name, layer, reference(name)[1])


def close(got, wanted):
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


# --- what holds for all of them --------------------------------------------------------------------------------------


def test_every_layer_that_is_built_has_a_reference():
    assert REFERENCES.keys() == BUILD.keys()


@EVERY_LAYER
def test_a_layer_computes_what_its_reference_does(name):
    close(called(loaded(name), name), reference(name)[2])


@EVERY_LAYER
def test_a_layer_compiles_as_one_graph(name):
    torch._dynamo.reset()
    layer = loaded(name)
    close(called(torch.compile(layer, backend="aot_eager", fullgraph=True), name), reference(name)[2])


@EVERY_LAYER
def test_a_layer_can_be_copied_and_pickled(name):
    for clone in (copy.deepcopy(loaded(name)), pickle.loads(pickle.dumps(loaded(name)))):
        close(called(clone, name), reference(name)[2])


@pytest.fixture(scope="module")
def on_two_processes():
    return run_in_processes(run_and_train, {name: reference(name) for name in REFERENCES}, ON_TWO_COMPILED)


@EVERY_LAYER
def test_a_layer_that_is_divided_over_two_processes_computes_the_same(on_two_processes, name):
    for rank in range(2):
        results = on_two_processes[rank][0][name]
        assert len(results) == 1 + (name in ON_TWO_COMPILED)
        for result in results:
            close(result, reference(name)[2])


def test_gradients_of_divided_weights_are_their_parts_of_the_gradients(on_two_processes):
    layer, (x,) = loaded("GeluAndMul"), reference("GeluAndMul")[1]
    wanted = gradients(layer, x)
    first, second = (found for _, found in on_two_processes)
    for name in ("gate_up_proj.weight", "gate_up_proj.bias"):
        parts = [torch.cat(pair) for pair in zip(first[name].chunk(2), second[name].chunk(2), strict=True)]
        close(torch.cat(parts), wanted[name])
    close(torch.cat((first["down_proj.weight"], second["down_proj.weight"]), 1), wanted["down_proj.weight"])
    close(first["x"] + second["x"], wanted["x"])
