"""Modules as strangers write them, each a model and its data: kinds of items."""

HEADER = """
from collections import namedtuple
from dataclasses import dataclass
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
"""

MLP = """
class Net(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, x):
        return self.body(x)
"""

CONV = """
class ConvNet(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d({channels}, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, img):
        h = F.relu(self.conv2(F.relu(self.conv1(img))))
        return self.fc(h.mean((2, 3)))
"""

PICTURE = """
from PIL import Image

def picture(k, mode="RGB"):
    rng = np.random.default_rng(k)
    pixels = rng.integers(0, 120, (12, 12, 3))
    pixels[:, 3 * (k % 4) : 3 * (k % 4) + 3] += 100
    return Image.fromarray(pixels.astype("uint8")).convert(mode)
"""

# name -> (source after HEADER, words of the command, what is guessed)
ITEMS = {
    "pairs": (
        MLP
        + """
class Blobs(Dataset):
    def __init__(self, n=200):
        g = torch.Generator().manual_seed(0)
        self.y = torch.randint(3, (n,), generator=g)
        self.x = torch.randn(n, 8, generator=g) + 2 * F.one_hot(self.y, 8)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]
""",
        "",
        "cross_entropy",
    ),
    "lists_of_python_numbers": (
        MLP
        + """
class Rows(Dataset):
    def __init__(self):
        self.rows = [[((7 * i + 3 * j) % 11) / 11 for j in range(8)] for i in range(150)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return [self.rows[i], int(self.rows[i][0] * 2.9)]
""",
        "",
        "cross_entropy",
    ),
    "dicts": (
        MLP
        + """
class Records(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "label": int(x[:3].argmax())}
""",
        "",
        "cross_entropy",
    ),
    "dicts_label_first_and_an_id": (
        MLP
        + """
class Records(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"label": x[:3].argmax(), "features": x, "id": f"patient-{i:04d}"}
""",
        "",
        "cross_entropy",
    ),
    "samples_of_a_dataclass": (
        MLP
        + """
@dataclass
class Sample:
    features: torch.Tensor
    target: int
    note: str = ""

class Samples(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return Sample(x, int(x[:3].argmax()))
""",
        "",
        "cross_entropy",
    ),
    "named_tuples": (
        MLP
        + """
Point = namedtuple("Point", "inputs label")

class Points(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return Point(x, x[:3].argmax())
""",
        "",
        "cross_entropy",
    ),
    "numpy_float64": (
        MLP
        + """
class Table(Dataset):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.X = rng.normal(size=(160, 8))
        self.Y = self.X @ rng.normal(size=(8, 3))

    def __len__(self):
        return len(self.X)

    def __getitem__(self, i):
        return self.X[i], self.Y[i]
""",
        "",
        "squared_error",
    ),
    "numpy_classes_int32": (
        MLP
        + """
class Table(Dataset):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.X = rng.normal(size=(160, 8)).astype("float32")
        self.Y = self.X[:, :3].argmax(1).astype("int32")

    def __len__(self):
        return len(self.X)

    def __getitem__(self, i):
        return self.X[i], self.Y[i]
""",
        "",
        "cross_entropy",
    ),
    "single_tensors": (
        """
class AutoEncoder(nn.Module):
    def __init__(self, width: int = 16, code: int = 4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, code))
        self.decoder = nn.Sequential(nn.Linear(code, 12), nn.Tanh(), nn.Linear(12, width))

    def forward(self, x):
        return self.decoder(self.encoder(x))

class Waves(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        return torch.sin(torch.linspace(0, 3, 16) * (1 + i % 7) + i)
""",
        "",
        "squared_error",
    ),
    "pil_images": (
        CONV.format(channels=3)
        + PICTURE
        + """
class Pictures(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        return picture(i), i % 4
""",
        "",
        "cross_entropy",
    ),
    "torchvision_like": (
        CONV.format(channels=1)
        + PICTURE
        + """
class FashionLike(Dataset):
    classes = ["shirt", "shoe", "bag", "coat"]

    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        self.root, self.train = root, train
        self.transform, self.target_transform = transform, target_transform
        self.targets = [i % 4 for i in range(96)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        img, target = picture(index, "L"), self.targets[index]
        if self.transform is not None:
            img = self.transform(img)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return img, target
""",
        "data.root=./data",
        "cross_entropy",
    ),
    "hugging_face_rows": (
        """
import datasets

class Tabular(nn.Module):
    def __init__(self, d_in=6, n_classes=3):
        super().__init__()
        self.fc = nn.Linear(d_in, n_classes)

    def forward(self, features):
        return self.fc(features)

def load_dataset():
    rng = np.random.default_rng(1)
    features = rng.normal(size=(90, 6))
    return datasets.Dataset.from_dict({
        "text": [f"row {i}" for i in range(90)],
        "features": features.tolist(),
        "label": features[:, :3].argmax(1).tolist(),
    })
""",
        "",
        "cross_entropy",
    ),
    "hugging_face_text_model": (
        """
import datasets
from dataclasses import field

@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.fc = nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask=None, labels=None):
        h = self.emb(input_ids)
        if attention_mask is not None:
            h = h * attention_mask[..., None]
        logits = self.fc(h.mean(1))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss, logits)

def get_data():
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 50, (100, 10))
    return datasets.Dataset.from_dict({
        "sentence": ["words"] * 100,
        "input_ids": ids.tolist(),
        "attention_mask": np.ones_like(ids).tolist(),
        "labels": (ids[:, 0] > 24).astype(int).tolist(),
    })
""",
        "",
        "the model",
    ),
    "tensor_dataset_at_the_top": (
        MLP
        + """
X = torch.randn(150, 8, generator=torch.Generator().manual_seed(0))
train_ds = TensorDataset(X[:120], X[:120, :3].argmax(1))
test_ds = TensorDataset(X[120:], X[120:, :3].argmax(1))
""",
        "",
        "cross_entropy",
    ),
    "a_subset_of_a_class_with_arguments": (
        MLP
        + """
class Blobs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

def make_train_data(n: int = 160):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(0))
    everything = Blobs(x, x[:, :3].argmax(1))
    return Subset(everything, range(0, n, 2))
""",
        "",
        "cross_entropy",
    ),
    "concatenated": (
        MLP
        + """
def both_datasets():
    x = torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return ConcatDataset([TensorDataset(x[:60], y[:60]), TensorDataset(x[60:], y[60:])])
""",
        "",
        "cross_entropy",
    ),
}
