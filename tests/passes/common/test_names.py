"""A user names modules by their paths, or by the ends of these."""

from __future__ import annotations

import pytest
from torch import fx, nn

from fxpipe.ir.graph import stage_nodes
from passes.common.names import named_nodes, nothing_named


class Row(nn.Module):
    """Calls a module at each of these paths, one after the other."""

    def __init__(self, paths):
        super().__init__()
        self.paths = paths
        for path in paths:
            parent = self
            *outer, name = path.split(".")
            for part in outer:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(name, nn.Linear(3, 3))

    def forward(self, x):
        for path in self.paths:
            x = self.get_submodule(path)(x)
        return x


def work(*paths):
    return list(stage_nodes(fx.symbolic_trace(Row(paths)).graph))


GPT = work("transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.h.2", "lm_head")


@pytest.mark.parametrize("name", ["transformer.h.2", "h.2", "transformer_h_2"])
def test_a_module_is_found_by_its_path_by_the_end_of_it_and_by_its_node(name):
    assert [node.name for node in named_nodes(GPT, name)] == ["transformer_h_2"]


def test_the_end_of_a_path_may_name_a_module_that_is_not_called_itself():
    assert [n.name for n in named_nodes(GPT, "h")] == [f"transformer_h_{i}" for i in range(3)]


def test_an_end_that_several_paths_have_names_none_of_them():
    both = work("encoder.h.0", "decoder.h.0")
    assert named_nodes(both, "h.0") == []
    assert nothing_named(both, "h.0") == (
        "several modules have a path that ends so: give one of 'encoder.h.0', 'decoder.h.0'"
    )


def test_a_part_of_a_name_is_no_end_of_a_path():
    assert named_nodes(GPT, "te") == []


def test_near_names_are_suggested():
    assert "did you mean 'transformer.h.2'" in nothing_named(GPT, "tranformer.h.2")
