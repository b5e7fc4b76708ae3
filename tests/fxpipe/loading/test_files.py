"""Checkpoints on disk as tensors that are read when they are used."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fxpipe.loading import files, stored_tensors

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.half": torch.ones(2, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "small": torch.ones(2).to(torch.float8_e4m3fn),
}


@pytest.fixture(params=["model.safetensors", "model.bin", "sharded", "sharded.bin"])
def checkpoint(request, tmp_path):
    """The same tensors in files of each kind."""
    save = torch.save if request.param.endswith("bin") else save_file
    if not request.param.startswith("sharded"):
        save(TENSORS, tmp_path / request.param)
        return tmp_path / request.param
    kind = "bin" if request.param.endswith("bin") else "safetensors"
    names = list(TENSORS)
    shards = {f"model-1-of-2.{kind}": names[:2], f"model-2-of-2.{kind}": names[2:]}
    for file, own in shards.items():
        save({name: TENSORS[name] for name in own}, tmp_path / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    index = tmp_path / f"model.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_tensors_are_those_of_the_checkpoint(checkpoint):
    stored = stored_tensors(checkpoint)
    assert sorted(stored) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert stored[name].shape == tensor.shape
        assert stored[name].dtype == tensor.dtype
        own = torch.empty_like(tensor).copy_(stored[name])
        assert torch.equal(own.to(torch.complex128), tensor.to(torch.complex128))


def test_a_folder_stands_for_the_checkpoint_in_it(checkpoint):
    assert sorted(stored_tensors(checkpoint.parent)) == sorted(TENSORS)


def test_nothing_is_read_before_it_is_used_and_nothing_is_kept(tmp_path, monkeypatch):
    save_file(TENSORS, tmp_path / "model.safetensors")
    read = []
    original = files._from_safetensors

    def watched(path, name):
        read.append(name)
        return original(path, name)

    monkeypatch.setattr(files, "_from_safetensors", watched)
    stored = stored_tensors(tmp_path)
    assert str(stored["a.weight"]) == "Stored(torch.float32, [2, 3])"
    assert read == []
    assert stored["a.weight"].sum() == 15
    assert (stored["a.weight"] + 1).sum() == 21
    assert read == ["a.weight", "a.weight"]


def test_a_state_dict_of_them_loads_a_module(tmp_path):
    model = nn.Linear(3, 2)
    save_file(dict(model.state_dict()), tmp_path / "linear.safetensors")
    other = nn.Linear(3, 2)
    other.load_state_dict(stored_tensors(tmp_path))
    assert torch.equal(other.weight, model.weight)
    assert type(other.weight) is nn.Parameter


def test_hooks_of_a_module_may_compute_with_them(tmp_path):
    class Transposed(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t().contiguous()
            super()._load_from_state_dict(state_dict, prefix, *args)

    weight, bias = torch.randn(3, 2), torch.randn(2)
    save_file({"weight": weight, "bias": bias}, tmp_path / "old.safetensors")
    model = Transposed(3, 2)
    model.load_state_dict(stored_tensors(tmp_path))
    assert torch.equal(model.weight, weight.t())


@pytest.mark.parametrize(
    "names, message",
    [
        ([], "holds no checkpoint: give a folder or a file of safetensors, or of torch.save"),
        (["a.safetensors", "b.safetensors"], r"several checkpoints \(a.safetensors, b.safe"),
    ],
)
def test_a_folder_without_one_checkpoint_is_refused(tmp_path, names, message):
    for name in names:
        save_file(TENSORS, tmp_path / name)
    with pytest.raises(ValueError, match=message):
        stored_tensors(tmp_path)


def test_of_several_files_the_one_called_model_is_taken(tmp_path):
    save_file({"right": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"wrong": torch.ones(1)}, tmp_path / "optimizer.safetensors")
    assert list(stored_tensors(tmp_path)) == ["right"]


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*nothing"):
        stored_tensors(tmp_path / "nothing")


def test_an_index_that_is_none_is_refused(tmp_path):
    index = tmp_path / "config.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match="is no index of a sharded checkpoint"):
        stored_tensors(index)


def test_an_index_names_files_that_are_there_and_hold_what_it_says(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"names the file one.safetensors, which is not"):
        stored_tensors(index)
    save_file({"b": torch.ones(1)}, tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=r"says that a is in one.safetensors, which does not hold"):
        stored_tensors(index)


def test_a_file_that_holds_more_than_tensors_is_refused_with_what_to_write(tmp_path):
    torch.save({"epoch": 3, "model": TENSORS}, tmp_path / "all.pt")
    with pytest.raises(ValueError, match=r"'epoch' is a int.*mmap=True\)\['model'\]\)"):
        stored_tensors(tmp_path / "all.pt")


def test_a_file_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        stored_tensors(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def test_without_the_library_files_of_safetensors_are_refused_with_its_name(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        "from fxpipe.loading import stored_tensors\n"
        f"stored_tensors({str(tmp_path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: files of safetensors are read by the library" in done.stderr
