"""Batch norms and the residual blocks of timm's and torchvision's ResNets, fused."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle

import pytest
import torch
from functional_checks import normal
from resnets import NAME, Block, Model, stand_in
from torch import Tensor, nn
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.fusions import fused_modules
from pyactcomp.fusions.families import resnet
from pyactcomp.fusions.formulas import calls_in_turn, definition


@pytest.fixture(autouse=True)
def resnet_module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other classes stand where torchvision defines its own, but where the real ones are wanted."""
    if not request.node.get_closest_marker("gpu"):
        stand_in(monkeypatch)


def images() -> Tensor:
    # 256 elements a channel after the stem's pooling: fewer run torch's own batch norm.
    return normal(4, 3, 32, 32)


def model(**changes: object) -> Model:
    torch.manual_seed(0)
    made = Model().train()
    for name, value in changes.items():
        parent, _, child = name.replace("__", ".").rpartition(".")
        setattr(made.get_submodule(parent), child, value)
    return made


def gradients(of: nn.Module) -> list[Tensor]:
    of.zero_grad()
    of(images()).square().sum().backward()
    return [p.grad.clone() for p in of.parameters() if p.grad is not None]


def compressed(of: nn.Module, **options: object) -> nn.Module:
    return pyactcomp.compress(copy.deepcopy(of), min_bytes=0, **options)


def relative_error(a: list[Tensor], b: list[Tensor]) -> float:
    return float(torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm()) / float(
        torch.cat([y.flatten() for y in b]).norm()
    )


def test_blocks_and_stem_are_fused_and_go_back() -> None:
    plain = model()
    names = [type(m).__name__ for m in plain.modules()]
    state = copy.deepcopy(plain.state_dict())
    fused = pyactcomp.compress(plain)
    forms = dict(fused_modules(fused))
    assert forms["layer1.0"] == forms["layer1.1"] == "ResidualBlock"
    assert (forms[""], forms["bn1"], "relu" in forms) == ("ResNet", "BatchNorm2d", False)
    assert forms["layer1.0.downsample.1"] == "BatchNorm2d"
    assert [type(m).__name__ for m in fused.modules()] == names
    assert list(fused.state_dict()) == list(state)
    pyactcomp.decompress(fused)
    assert type(fused.layer1[0]) is Block
    assert type(fused.bn1) is nn.BatchNorm2d
    assert type(fused.relu) is nn.ReLU


def test_step_is_that_of_the_plain_model() -> None:
    plain = model()
    fused = compressed(plain)
    exact = copy.deepcopy(plain).double()
    exact(images().double()).square().sum().backward()
    wanted = [p.grad.float() for p in exact.parameters() if p.grad is not None]
    assert relative_error(gradients(fused), wanted) < GRADIENT_BOUND
    gradients(plain)
    for (name, ours), theirs in zip(fused.named_buffers(), plain.buffers(), strict=True):
        # The same operators on the CPU; their order in a block is the same too.
        assert torch.equal(ours, theirs), name
    assert int(fused.bn1.num_batches_tracked) == 1


def test_first_forward_is_fused_already() -> None:
    nodes: dict[str, str] = {}

    def note(module: nn.Module, args: object, output: Tensor, name: str) -> None:
        assert output.grad_fn is not None
        nodes[name] = output.grad_fn.name()

    fused = compressed(model())
    for name in ("maxpool", "layer1.0.downsample", "layer1"):
        fused.get_submodule(name).register_forward_hook(functools.partial(note, name=name))
    fused(images())
    assert nodes["layer1"] == nodes["layer1.0.downsample"] == "_BatchNormBackward"
    assert nodes["maxpool"] == "_MaxPoolBackward"


def test_fused_forward_is_that_of_the_plain_one() -> None:
    plain = model()
    assert torch.equal(compressed(plain)(images()), plain(images()))


def test_evaluation_is_that_of_the_plain_model() -> None:
    plain = model().eval()
    fused = compressed(plain)
    assert torch.equal(fused(images()), plain(images()))
    with torch.no_grad():
        assert torch.equal(fused.train()(images()), plain.train()(images()))


def test_momentum_none_is_the_cumulative_average() -> None:
    plain = model()
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    fused = compressed(plain)
    for _ in range(3):
        gradients(plain)
        gradients(fused)
    for ours, theirs in zip(fused.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer1__0__bn1": nn.BatchNorm2d(64).eval()},
        {"layer1__0__bn2": nn.GroupNorm(4, 64)},
        {"layer1__0__relu": nn.LeakyReLU()},
    ],
    ids=["frozen norm", "other norm", "other activation"],
)
def test_other_blocks_run_as_their_own_class(changes: dict[str, nn.Module]) -> None:
    plain = model(**changes)
    fused = compressed(plain)
    assert torch.equal(fused(images()), plain(images()))
    exact = copy.deepcopy(plain).double()
    exact(images().double()).square().sum().backward()
    assert relative_error(gradients(fused), [p.grad.float() for p in exact.parameters()]) < GRADIENT_BOUND


@pytest.mark.parametrize("name", ["bn1", "relu", "layer1.0.bn1", "layer1.0.relu"])
@pytest.mark.parametrize("after", [False, True])
def test_hooked_children_still_run(name: str, after: bool) -> None:
    plain = model()
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        seen.append(output.detach().clone())

    fused = plain if not after else pyactcomp.compress(plain)
    fused.get_submodule(name).register_forward_hook(hook)
    fused = fused if after else pyactcomp.compress(fused)
    gradients(fused)
    expected = list(seen)
    seen.clear()
    gradients(pyactcomp.decompress(fused))
    assert len(seen) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def rectified_norms(of: nn.Module, monkeypatch: pytest.MonkeyPatch, *inputs: Tensor) -> int:
    """Return how many norms of a forward apply ReLU in the same pass, without an addition."""
    found = []
    own = resnet.batch_norm

    def noted(*args: object, relu: bool, residual: Tensor | None, **options: object) -> Tensor:
        found.append(relu and residual is None)
        return own(*args, relu=relu, residual=residual, **options)

    with monkeypatch.context() as patch:
        patch.setattr(resnet, "batch_norm", noted)
        of(*inputs)
    return sum(found)


class Wrapper(nn.Module):
    """A program's own model around a ResNet, of which it calls the parts."""

    def __init__(self, net: Model, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, x: Tensor) -> Tensor:
        """Return what the kind of wrapper makes of the stem."""
        if self.kind == "forward_features":
            return self.net.forward_features(x)
        x = self.net.bn1(self.net.conv1(x))
        if self.kind == "skip":
            return self.net.relu(x.clone()) + x
        if self.kind == "by hand":
            return self.net.layer1(self.net.maxpool(self.net.relu(x)))
        return self.net.layer1(self.net.maxpool(nn.functional.silu(x)))


@pytest.mark.parametrize("kind", ["silu", "skip", "by hand", "forward_features"])
def test_wrapper_that_calls_the_stem_gets_the_output_of_its_norm(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Wrapper(model(), kind)
    fused = compressed(plain)
    # The ResNet's own method runs norm and ReLU in one pass; two more norms are those of its blocks.
    assert rectified_norms(fused, monkeypatch, images()) == {"forward_features": 3, "skip": 0}.get(kind, 2)
    assert torch.equal(fused(images()), plain(images()))
    exact = copy.deepcopy(plain).double()
    exact(images().double()).square().sum().backward()
    wanted = [p.grad.float() for p in exact.parameters() if p.grad is not None]
    assert relative_error(gradients(fused), wanted) < GRADIENT_BOUND


@pytest.mark.parametrize("name", ["bn1", "relu", "conv1", ""])
def test_stem_runs_in_one_pass_where_nobody_looks_at_its_norm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = compressed(model())
    assert rectified_norms(fused, monkeypatch, images()) == 3
    seen: list[Tensor] = []
    handle = fused.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    assert rectified_norms(fused, monkeypatch, images()) == (2 if name in ("bn1", "relu") else 3)
    assert name != "relu" or float(seen[0].min()) < 0
    handle.remove()
    assert rectified_norms(fused, monkeypatch, images()) == 3


def test_another_method_of_the_class_runs_instead_of_the_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model()
    fused = compressed(plain)

    def forward_features(self: Model, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        return self.layer1(self.maxpool(self.relu(x) - x))

    monkeypatch.setattr(Model, "forward_features", forward_features)
    assert torch.equal(fused(images()), plain(images()))


class Methods:
    """Methods of which only the first one hands the norm's output to the activation alone."""

    def direct(self, x):
        """Call both in direct succession."""
        x = self.norm(x)
        x = self.relu(x)
        return self.head(x)

    def kept(self, x):
        """Keep what is in between."""
        y = self.norm(x)
        x = self.relu(y)
        return x + y

    def again(self, x):
        """Call the activation once more."""
        x = self.norm(x)
        x = self.relu(x)
        return self.relu(self.head(x))

    def by_name(self, x, name):
        """Read a child by a name that the source does not show."""
        x = self.norm(x)
        x = self.relu(x)
        return getattr(self, name)(x)

    def inherited(self, x):
        """Run what the source does not show."""
        x = self.norm(x)
        x = self.relu(x)
        return super().forward(x)

    def between(self, x):
        """Run something in between."""
        x = self.norm(x)
        self.head(x)
        x = self.relu(x)
        return x


def test_only_what_nothing_else_can_see_is_handed_on() -> None:
    found = {
        name: dict(calls_in_turn(definition(method))) for name, method in vars(Methods).items() if callable(method)
    }
    others = ("kept", "again", "by_name", "inherited", "between")
    assert found == {"direct": {"norm": "relu"}} | {name: {} for name in others}


def test_norms_of_a_deep_stem_run_in_one_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep() -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (3, 64, 64):
            layers += [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers[:-2])

    torch.manual_seed(0)
    plain = model(conv1=deep())
    fused = compressed(plain)
    assert rectified_norms(fused, monkeypatch, images()) == 5
    assert torch.equal(fused(images()), plain(images()))
    fused.conv1[1].register_forward_hook(lambda *_: None)
    assert rectified_norms(fused, monkeypatch, images()) == 4
    # By hand, and with a hook on all of the stem, the norms are norms.
    fused.conv1.register_forward_hook(lambda *_: None)
    assert rectified_norms(fused, monkeypatch, images()) == 3
    assert float(fused.conv1[:2](images()).detach().min()) < 0


def test_copies_and_pickles_stay_fused() -> None:
    fused = compressed(model())
    for clone in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert dict(fused_modules(clone)) == dict(fused_modules(fused))
        assert torch.equal(clone(images()), fused(images()))


def test_lossless_leaves_batch_norms_alone() -> None:
    plain = model()
    fused = compressed(plain, mode="lossless")
    assert not any("Norm" in form or form == "ResidualBlock" for _, form in fused_modules(fused))
    assert all(torch.equal(a, b) for a, b in zip(gradients(fused), gradients(plain), strict=True))


def test_less_is_held_than_without_fusion() -> None:
    def held(fuse: bool) -> int:
        fused = compressed(model(), fuse=fuse)
        fused(images()).sum().backward()
        return pyactcomp.report(fused).stored_bytes

    assert held(True) < held(False)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_resnet_of_a_library(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} defines the blocks", exc_type=ImportError)
    torch.manual_seed(0)
    if library == "timm":
        import timm

        plain = timm.create_model("resnet50", num_classes=10)
    else:
        # As timm's: otherwise a change of the input by 1e-4 changes the gradient by a quarter.
        plain = importlib.import_module(NAME).resnet50(num_classes=10, zero_init_residual=True)
    plain = plain.cuda().to(memory_format=torch.channels_last).train()
    fused = pyactcomp.compress(copy.deepcopy(plain))
    forms = dict(fused_modules(fused))
    assert list(forms.values()).count("ResidualBlock") == 16
    assert forms[""] == "ResNet"
    x = normal(16, 3, 96, 96).cuda().to(memory_format=torch.channels_last)
    labels = torch.arange(16, device="cuda") % 10
    grads = []
    for of in (fused, plain):
        torch.nn.functional.cross_entropy(of(x), labels).backward()
        grads.append([p.grad for p in of.parameters()])
    assert relative_error(*grads) < GRADIENT_BOUND
