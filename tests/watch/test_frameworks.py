"""Scripts of real frameworks train the same under the recorder, and their steps are found."""

import pytest

from trainpace.report.watch import step_in_words
from trainpace.watch import steps_per_epoch
from watch.beside_bare import lacking, trained, use_libraries

FOLDERS = (".zoo", ".engines")
LANGUAGE = """
import tokenizers, transformers
from datasets import Dataset
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", *"abcdefgh"])}, "a"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
    vocab_size=10, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0))
texts = [" ".join("abcdefgh"[(i * k) % 8] for k in range(3 + i % 5)) for i in range(64)]
options = {"output_dir": os.environ["LOSSES"] + "-out", "report_to": "none", "use_cpu": True, "save_strategy": "no",
           "logging_steps": 1, "disable_tqdm": True, "per_device_train_batch_size": 4, "bf16": False}
"""
SCRIPTS = {
    "TRL SFTTrainer": (
        LANGUAGE
        + """
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model, args=SFTConfig(max_steps=12, gradient_accumulation_steps=2, max_length=32, **options),
                     train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
trainer.train()
keep([row["loss"] for row in trainer.state.log_history if "loss" in row])
""",
        12,
        "2 micro-batches",
    ),
    "TRL GRPOTrainer": (
        LANGUAGE
        + """
from trl import GRPOConfig, GRPOTrainer
trainer = GRPOTrainer(model, lambda completions, **_: [float(len(set(c))) for c in completions], processing_class=tokenizer,
                      args=GRPOConfig(max_steps=12, num_generations=2, max_completion_length=6, **options),
                      train_dataset=Dataset.from_dict({"prompt": texts}))
trainer.train()
keep([row["reward"] for row in trainer.state.log_history if "reward" in row])
""",
        12,
        "",
    ),
    "diffusers, as train_unconditional.py, with EMA": (
        """
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
                    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))
accelerator, noise_scheduler = Accelerator(cpu=True), DDPMScheduler(num_train_timesteps=100)
ema = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images = torch.rand(64, 1, 8, 8)
loader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True)
lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=32)
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
losses = []
for epoch in range(2):
    model.train()
    for clean in loader:
        noise, steps = torch.randn(clean.shape), torch.randint(0, 100, (len(clean),))
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(noise_scheduler.add_noise(clean, noise, steps), steps).sample, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); lr_scheduler.step(); optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
        losses.append(loss.item())
keep(losses)
""",
        32,
        "",
    ),
    "torch_geometric, all nodes at once": (
        """
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(16, 8, cached=True), GCNConv(8, 3, cached=True)
    def forward(self, x, edges):
        x = nn.functional.dropout(x, p=0.5, training=self.training)
        x = nn.functional.dropout(self.conv1(x, edges).relu(), p=0.5, training=self.training)
        return self.conv2(x, edges)
data = Data(x=torch.rand(200, 16), edge_index=torch.randint(0, 200, (2, 800)), y=torch.randint(0, 3, (200,)))
model, losses = GCN(), []
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
@torch.no_grad()
def test():
    model.eval()
    return model(data.x, data.edge_index).argmax(-1)
for epoch in range(24):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(data.x, data.edge_index), data.y)
    loss.backward()
    optimizer.step()
    test()
    losses.append(loss)
keep(losses)
""",
        24,
        "",
    ),
    "timm, with its optimizer, mixup, clipping and EMA": (
        """
import numpy, timm, timm.optim, timm.scheduler, timm.utils
numpy.random.seed(0)
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
model = timm.create_model("resnet10t", num_classes=4)
ema = timm.utils.ModelEmaV3(model, decay=0.99)
optimizer = timm.optim.create_optimizer_v2(model, opt="lamb", lr=1e-3)
scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, warmup_epochs=1)
scaler, mixup, loss_of = timm.utils.NativeScaler(device="cpu"), Mixup(mixup_alpha=0.2, num_classes=4), SoftTargetCrossEntropy()
images = torch.utils.data.TensorDataset(torch.rand(32, 3, 32, 32), torch.arange(32) % 4)
losses = []
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(images, batch_size=4):
        x, y = mixup(x, y)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        ema.update(model)
        losses.append(loss.item())
    scheduler.step(epoch + 1)
keep(losses)
""",
        16,
        "",
    ),
    "datasets, streamed by two workers": (
        """
from datasets import IterableDataset
def samples(part):
    for i in part:
        generator = torch.Generator().manual_seed(i)
        yield {"x": torch.rand(8, generator=generator).tolist(), "y": i % 3}
def main():
    stream = IterableDataset.from_generator(samples, gen_kwargs={"part": [*range(128)]}).shuffle(0, buffer_size=16).with_format("torch")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in torch.utils.data.DataLoader(stream, batch_size=4, num_workers=2):
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    keep(losses)
if __name__ == "__main__":
    main()
""",
        32,
        "",
    ),
    "Lightning, a GAN by manual optimisation": (
        """
import lightning.pytorch as pl
class GAN(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.losses = False, []
        self.makes, self.judges = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.makes, self.judges)]
    def training_step(self, batch, _):
        (real,), (first, second) = batch, self.optimizers()
        made, told = self.makes(torch.randn(len(real), 4)), nn.functional.softplus
        self.toggle_optimizer(first)
        loss = told(-self.judges(made)).mean()
        first.zero_grad(); self.manual_backward(loss); first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged = told(-self.judges(real)).mean() + told(self.judges(made.detach())).mean()
        second.zero_grad(); self.manual_backward(judged); second.step()
        self.untoggle_optimizer(second)
        self.losses += [loss.item(), judged.item()]
model, data = GAN(), torch.utils.data.TensorDataset(torch.randn(80, 8))
pl.Trainer(max_epochs=2, limit_train_batches=10, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
           enable_model_summary=False).fit(model, torch.utils.data.DataLoader(data, batch_size=4))
keep(model.losses)
""",
        20,
        "2 optimizers",
    ),
}
ELASTIC = """
model, losses = nn.Linear(8, 3), []
torch.distributed.init_process_group("gloo")
net = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(16):
    loss = net(torch.rand(4, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
    if step == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
if torch.distributed.get_rank() == 0:
    keep(losses)
"""


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    use_libraries(monkeypatch, *FOLDERS)


@pytest.mark.slow
@pytest.mark.skipif(bool(lacking(*FOLDERS)), reason=f"make {lacking(*FOLDERS)}")
@pytest.mark.parametrize("name", SCRIPTS)
def test_framework_script_trains_the_same_and_its_steps_are_counted(name, tmp_path):
    text, steps, said = SCRIPTS[name]
    bare, watched, recording = trained(text, tmp_path)
    assert watched == bare
    assert len(bare) > 10
    (rank,) = recording.ranks
    # time before the end of the first step is not a whole step
    assert rank.steps + 3 == steps
    assert rank.parts_ms["forward"] > 0
    assert rank.parts_ms["backward"] > 0
    assert said in step_in_words(rank)
    assert bool(said) == bool(step_in_words(rank))
    if "limit_train_batches=10" in text:
        assert steps_per_epoch(rank) == 10


@pytest.mark.slow
def test_elastic_restart_is_recorded_as_its_longest_process(tmp_path):
    launcher = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    )
    bare, watched, recording = trained(ELASTIC, tmp_path, *launcher)
    assert watched == bare
    (rank,) = recording.ranks
    assert rank.steps + 3 == 16
    assert (
        recording.seen
        == "1 more process trained with the same rank, or with none, for no more steps. Those steps are"
        " not counted."
    )
