"""Frameworks with a loop of their own: losses follow those without compression, and bytes are a plain loop's."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from trainers import LR, OPTIONS, RATIO_BAR, STEPS, assert_follows, assert_ratio, plain_loop, ratio
from works_with import Transformer, regression

import pyactcomp

# Packages that warn of their own deprecations, of few workers, and of loggers that nobody asked for.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def regressed() -> tuple[Callable[[nn.Module], Tensor], nn.Module, float]:
    """Return a loss over one batch, a model, and the ratio of a plain loop."""
    torch.manual_seed(0)
    model = Transformer()
    inputs, targets = regression("cpu")

    def loss_of(model: nn.Module) -> Tensor:
        return F.mse_loss(model(inputs), targets)

    return loss_of, model, plain_loop(model, loss_of)


def test_fabric(regressed: Any) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    loss_of, initial, expected = regressed

    def trained(compressing: bool) -> tuple[list[float], Any]:
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        model = copy.deepcopy(initial)
        if compressing:
            pyactcomp.compress(model, **OPTIONS)
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=LR))
        curve = []
        for _ in range(STEPS):
            loss = loss_of(wrapped)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve, pyactcomp.report(model) if compressing else None

    (got, report), (exact, _) = trained(True), trained(False)
    assert_follows(got, exact)
    assert_ratio(report, expected)


@pytest.mark.parametrize("store", [None, "int8"])
def test_diffusers_with_accelerate(store: Any) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    accelerate = importlib.import_module("accelerate")
    compress_trained = importlib.import_module("pyactcomp.integrations.diffusers").compress_trained
    torch.manual_seed(0)
    initial = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    scheduler = diffusers.DDPMScheduler()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    images, noise = torch.randn(2, 4, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    times = torch.tensor([10, 200, 500, 900])

    def loss_of(model: nn.Module) -> Tensor:
        return F.mse_loss(model(scheduler.add_noise(images, noise, times), times).sample, noise)

    def trained(compressing: bool) -> tuple[list[float], Any]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True)
        unet = copy.deepcopy(initial).train()
        if compressing:
            assert list(compress_trained({"unet": unet, "vae": frozen}, store=store, **OPTIONS)) == ["unet"]
        model, optimizer = accelerator.prepare(unet, torch.optim.SGD(unet.parameters(), lr=LR))
        curve = []
        for _ in range(STEPS):
            loss = loss_of(model)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve, pyactcomp.report(unet) if compressing else None

    (got, report), (exact, _) = trained(True), trained(False)
    assert_follows(got, exact)
    looped = copy.deepcopy(initial)
    if store is not None:
        looped.enable_gradient_checkpointing()
    assert_ratio(report, plain_loop(looped, loss_of))


def test_diffusers_without_a_trained_model_is_refused() -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    compress_trained = importlib.import_module("pyactcomp.integrations.diffusers").compress_trained
    with pytest.raises(ValueError, match="no model of vae has a parameter that needs a gradient"):
        compress_trained({"vae": nn.Linear(2, 2).requires_grad_(False)})


class Regression(Dataset):  # type: ignore[type-arg]
    """The batch of :func:`regression`, row by row."""

    def __init__(self) -> None:
        self.inputs, self.targets = regression("cpu")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def test_fastai(regressed: Any, tmp_path: Path) -> None:
    basics = pytest.importorskip("fastai.basics", reason="fastai is not installed")
    _, initial, expected = regressed
    loader = basics.DataLoader(Regression(), bs=4)

    def trained(compressing: bool) -> tuple[list[float], Any]:
        model = copy.deepcopy(initial)
        if compressing:
            pyactcomp.compress(model, **OPTIONS)
        loaders = basics.DataLoaders(loader, loader, device=torch.device("cpu"))
        learner = basics.Learner(loaders, model, loss_func=F.mse_loss, opt_func=basics.SGD, lr=LR, path=tmp_path)
        curve: list[float] = []

        class Noting(basics.Callback):  # type: ignore[misc]
            def after_loss(self) -> None:
                if self.training:
                    curve.append(self.loss.item())

        learner.remove_cbs([each for each in learner.cbs if type(each).__name__ in ("ProgressCallback", "Recorder")])
        learner.fit(STEPS, cbs=Noting())
        return curve, pyactcomp.report(model) if compressing else None

    (got, report), (exact, _) = trained(True), trained(False)
    assert_follows(got, exact)
    assert_ratio(report, expected)


def test_monai() -> None:
    nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")
    engines = importlib.import_module("monai.engines")
    dice = importlib.import_module("monai.losses").DiceCELoss(sigmoid=True)
    torch.manual_seed(0)
    initial = nets.UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 1, 16, 16, 16, generator=generator)
    data = [{"image": image, "label": (image > 0).float()} for image in images]

    def loss_of(model: nn.Module) -> Tensor:
        return dice(model(images), (images > 0).float())

    def trained(compressing: bool) -> tuple[list[float], Any]:
        model = copy.deepcopy(initial).train()
        if compressing:
            pyactcomp.compress(model, **OPTIONS)
        curve: list[float] = []
        trainer = engines.SupervisedTrainer(
            device=torch.device("cpu"),
            max_epochs=STEPS,
            train_data_loader=DataLoader(data, batch_size=2),
            network=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=LR),
            loss_function=dice,
        )
        ended = importlib.import_module("ignite.engine").Events.ITERATION_COMPLETED
        trainer.add_event_handler(ended, lambda engine: curve.append(float(engine.state.output[0]["loss"])))
        trainer.run()
        return curve, pyactcomp.report(model) if compressing else None

    (got, report), (exact, _) = trained(True), trained(False)
    assert_follows(got, exact)
    assert_ratio(report, plain_loop(initial, loss_of))


@pytest.mark.slow  # two trainings of a whole YOLOv8
def test_ultralytics(tmp_path: Path) -> None:
    pytest.importorskip("ultralytics", reason="Ultralytics is not installed")
    pillow = importlib.import_module("PIL.Image")
    compression = importlib.import_module("pyactcomp.integrations.ultralytics").Compression
    yolo = importlib.import_module("ultralytics").YOLO
    generator = torch.Generator().manual_seed(1)
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for index in range(4):
        pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8, generator=generator)
        pillow.fromarray(pixels.numpy()).save(tmp_path / "images" / f"{index}.png")
        (tmp_path / "labels" / f"{index}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: [one]\n")
    batches: list[tuple[nn.Module, Any]] = []

    def trained(compressing: bool) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = yolo("yolov8n.yaml", verbose=False)
        ours = compression(model, **OPTIONS) if compressing else None
        curve: list[float] = []
        model.add_callback("on_train_start", lambda trainer: batches.append((copy.deepcopy(trainer.model), trainer)))
        model.add_callback("on_train_batch_end", lambda trainer: curve.append(trainer.loss.item()))
        model.train(
            data=str(tmp_path / "data.yaml"),
            epochs=STEPS,
            imgsz=64,
            batch=4,
            nbs=4,
            device="cpu",
            workers=0,
            project=str(tmp_path),
            plots=False,
            val=False,
            verbose=False,
            optimizer="SGD",
            lr0=0.0005,
            warmup_epochs=0,
            mosaic=0.0,
        )
        return curve, ours

    (exact, _), (got, ours) = trained(False), trained(True)
    assert_follows(got, exact)
    initial, trainer = batches[0]
    batch = trainer.preprocess_batch(next(iter(trainer.train_loader)))
    assert_ratio(ours.report, plain_loop(initial, lambda model: model(batch)[0].sum()))


@pytest.mark.slow  # three models of six layers and a large vocabulary
@pytest.mark.parametrize("checkpointed", [False, True])
def test_torchtitan(checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model, the parallelisation and FSDP2 of torchtitan, with the attention that backward on the CPU has."""
    llama3 = pytest.importorskip("torchtitan.models.llama3", reason="torchtitan is not installed")
    attention = importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    config = importlib.import_module("torchtitan.config")
    distributed = importlib.import_module("torchtitan.distributed")
    policies = importlib.import_module("torchtitan.distributed.activation_checkpoint")
    compression = importlib.import_module("pyactcomp.integrations.torchtitan").Compression
    monkeypatch.setattr(llama3, "get_attention_config", lambda backend: attention.Config())
    monkeypatch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")
    policy = policies.FullAC.Config() if checkpointed else None
    tokens = torch.randint(2048, (2, 65), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    positions = torch.arange(64).expand(2, 64)

    def loss_of(model: nn.Module) -> Tensor:
        logits = model(inputs, positions=positions, attention_masks=None)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets)

    def made(ac: Any) -> nn.Module:
        spec = llama3.model_registry("debugmodel")
        with torch.device("meta"):
            model = spec.model.build()
        spec.parallelize_fn(
            model,
            parallel_dims=distributed.ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1),
            training=config.TrainingConfig(mixed_precision_param="float32"),
            parallelism=config.ParallelismConfig(),
            compile_config=config.CompileConfig(enable=False),
            ac_config=ac,
            dump_folder="",
        )
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_weights()
        return model.train()

    def trained(ac: Any) -> tuple[list[float], nn.Module]:
        model = made(ac)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        curve = []
        for _ in range(STEPS):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve, model

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        exact, _ = trained(policy)
        got, model = trained(compression.Config(options=OPTIONS, policy=policy))
        report, alone = pyactcomp.report(model), pyactcomp.compress(made(policy), **OPTIONS)
        loss_of(alone).backward()
    finally:
        torch.distributed.destroy_process_group()
    assert_follows(got, exact)
    assert_ratio(report, ratio(pyactcomp.report(alone)))


def test_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras was imported with another backend before")
    inputs, targets = (each.numpy() for each in regression("cpu"))

    def made() -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input(inputs.shape[1:]), *(keras.layers.Dense(256, "gelu") for _ in range(3)), keras.layers.Dense(1)]
        )
        model.compile(optimizer=keras.optimizers.SGD(LR), loss="mse")
        return model

    def trained(compressing: bool) -> tuple[list[float], Any]:
        model = made()
        if compressing:
            pyactcomp.compress(model, **OPTIONS)
        history = model.fit(inputs, targets, batch_size=len(inputs), epochs=STEPS, shuffle=False, verbose=0)
        return history.history["loss"], pyactcomp.report(model) if compressing else None

    (got, report), (exact, _) = trained(True), trained(False)
    assert_follows(got, exact)
    model = pyactcomp.compress(made(), **OPTIONS)
    F.mse_loss(model(torch.from_numpy(inputs), training=True), torch.from_numpy(targets)).backward()
    assert_ratio(report, ratio(pyactcomp.report(model)))


@pytest.mark.slow  # starts a cluster
def test_ray_train(regressed: Any, tmp_path: Path) -> None:
    train = pytest.importorskip("ray.train.torch", reason="Ray Train is not installed")
    ray, settings = importlib.import_module("ray"), importlib.import_module("ray.train")
    loss_of, initial, expected = regressed
    written = tmp_path / "result"

    def loop(config: dict[str, Any]) -> None:
        model = copy.deepcopy(initial)
        if config["compressing"]:
            pyactcomp.compress(model, **OPTIONS)
        wrapped = train.prepare_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        curve = []
        for _ in range(STEPS):
            loss = loss_of(wrapped)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        found = ratio(pyactcomp.report(model)) if config["compressing"] else None
        written.write_text(json.dumps([curve, found]))

    # The modules of the tests are not importable in the cluster's processes.
    cloudpickle = importlib.import_module("ray.cloudpickle")
    for name in (__name__, "works_with", "works_with_text", "trainers"):
        cloudpickle.register_pickle_by_value(importlib.import_module(name))
    ray.init(num_cpus=4)
    results = []
    try:
        for compressing in (True, False):
            trainer = train.TorchTrainer(
                loop,
                train_loop_config={"compressing": compressing},
                scaling_config=settings.ScalingConfig(num_workers=1, use_gpu=False),
                run_config=settings.RunConfig(storage_path=str(tmp_path / "runs")),
            )
            trainer.fit()
            results.append(json.loads(written.read_text()))
    finally:
        ray.shutdown()
    (got, found), (exact, _) = results
    assert_follows(got, exact)
    assert abs(found - expected) <= RATIO_BAR
