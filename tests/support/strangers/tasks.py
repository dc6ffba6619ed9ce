"""Modules as strangers write them, each a model and its data: kinds of targets and outputs."""

# name -> (source after HEADER, words of the command, what is guessed)
TASKS = {
    "values_against_a_column": (
        """
class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)

class Houses(Dataset):
    def __init__(self):
        self.x = torch.randn(160, 5, generator=torch.Generator().manual_seed(0))
        self.price = self.x @ torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0]) + 4

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.price[i]
""",
        "",
        "squared_error",
    ),
    "zeros_and_ones_against_a_column": (
        """
class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, x):
        return self.linear(x)

class Churn(Dataset):
    def __init__(self):
        self.x = torch.randn(160, 5, generator=torch.Generator().manual_seed(0))
        self.y = (self.x[:, 0] > 0).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]
""",
        "",
        "binary_cross_entropy",
    ),
    "probabilities_of_a_sigmoid": (
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return torch.sigmoid(self.b(torch.relu(self.a(x)))).squeeze(1)

class Churn(Dataset):
    def __init__(self):
        self.x = np.random.default_rng(0).normal(size=(160, 5))
        self.y = self.x[:, 0] > 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]).float(), float(self.y[i])
""",
        "",
        "binary_cross_entropy",
    ),
    "bools": (
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)

class Alarms(Dataset):
    def __init__(self):
        self.x = torch.randn(160, 5, generator=torch.Generator().manual_seed(0))
        self.y = self.x.sum(1) > 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]
""",
        "",
        "binary_cross_entropy",
    ),
    "bools_for_two_classes": (
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return F.log_softmax(self.net(x), dim=1)

class Alarms(Dataset):
    def __init__(self):
        self.x = torch.randn(160, 5, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": bool(self.x[i].sum() > 0)}
""",
        "",
        "cross_entropy",
    ),
    "whole_numbers_that_are_values": (
        """
class AgeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, face):
        return self.net(face)

class Faces(Dataset):
    def __init__(self):
        self.x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
        self.age = (40 + 12 * self.x[:, 0]).clamp(0, 90).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"face": self.x[i], "age": self.age[i]}
""",
        "",
        "squared_error",
    ),
    "several_labels": (
        """
class Tagger(nn.Module):
    def __init__(self, tags=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, tags))

    def forward(self, x):
        return self.net(x)

class Movies(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        x = torch.randn(10, generator=torch.Generator().manual_seed(i))
        return x, (x[:5] > 0.3).int()
""",
        "",
        "binary_cross_entropy",
    ),
    "masks_of_classes": (
        """
class UNetish(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(8, classes, 1)

    def forward(self, image):
        return self.out(torch.relu(self.up(torch.relu(self.down(image)))))

class Scenes(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(i))
        return {"image": image, "mask": image.argmax(0)}
""",
        "",
        "cross_entropy",
    ),
    "masks_of_floats": (
        """
class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        return self.c2(F.relu(self.c1(x)))

class Cells(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(i))
        return image, (image[0] > 0.5).float()
""",
        "",
        "binary_cross_entropy",
    ),
    "tags_of_a_sequence": (
        """
class LSTMTagger(nn.Module):
    def __init__(self, vocab=30, tags=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, tags)

    def forward(self, tokens):
        h, _ = self.lstm(self.emb(tokens))
        return self.out(h)

class Sentences(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        tokens = torch.randint(30, (6,), generator=torch.Generator().manual_seed(i))
        return tokens, tokens % 4
""",
        "",
        "cross_entropy",
    ),
    "tags_with_classes_first": (
        """
class ConvTagger(nn.Module):
    def __init__(self, vocab=30, tags=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, 8)
        self.conv = nn.Conv1d(8, tags, 3, padding=1)

    def forward(self, tokens):
        return self.conv(self.emb(tokens).transpose(1, 2))

class Sentences(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        tokens = torch.randint(30, (6,), generator=torch.Generator().manual_seed(i))
        return tokens, tokens % 4
""",
        "",
        "cross_entropy",
    ),
    "a_language_model_with_its_own_loss": (
        """
class TinyGPT(nn.Module):
    def __init__(self, vocab_size=32, n_embd=16):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.gru = nn.GRU(n_embd, n_embd, batch_first=True)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets=None):
        h, _ = self.gru(self.wte(idx))
        logits = self.lm_head(h)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

class Chars(Dataset):
    def __init__(self, block=8):
        self.block = block
        self.data = (torch.arange(400) * 7) % 32

    def __len__(self):
        return len(self.data) - self.block

    def __getitem__(self, i):
        return self.data[i : i + self.block], self.data[i + 1 : i + self.block + 1]
""",
        "",
        "the model",
    ),
    "ratings_of_two_ids": (
        """
class Factors(nn.Module):
    def __init__(self, n_users=20, n_items=30, k=4):
        super().__init__()
        self.u = nn.Embedding(n_users, k)
        self.v = nn.Embedding(n_items, k)

    def forward(self, user, item):
        return (self.u(user) * self.v(item)).sum(1)

class Ratings(Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, i):
        user, item = i % 20, (i * 7) % 30
        return user, item, float(1 + (user * item) % 5)
""",
        "",
        "squared_error",
    ),
    "windows_of_a_series": (
        """
class Forecaster(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.rnn = nn.GRU(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, window):
        out, h = self.rnn(window)
        return self.head(h[-1]), out

class Windows(Dataset):
    def __init__(self, series, length):
        self.series, self.length = series, length

    def __len__(self):
        return len(self.series) - self.length

    def __getitem__(self, i):
        return self.series[i : i + self.length], self.series[i + self.length]

t = torch.linspace(0, 30, 200)
dataset = Windows(torch.stack([t.sin(), t.cos()], 1), 12)
""",
        "",
        "squared_error",
    ),
    "nested_inputs": (
        """
class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(12, 8)
        self.table = nn.Linear(3, 8)
        self.head = nn.Linear(16, 3)

    def forward(self, image, table):
        h = torch.cat([self.image(image.flatten(1)), self.table(table)], 1).relu()
        return {"scores": self.head(h), "features": h}

class Patients(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        table = torch.randn(3, generator=g)
        return ({"image": torch.rand(3, 4, generator=g), "table": table}, table.argmax())
""",
        "",
        "cross_entropy",
    ),
    "a_function_makes_the_model": (
        """
def build_model(width: int = 16):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10)
    )

class Glyphs(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        image = torch.rand(8, 8, generator=torch.Generator().manual_seed(i))
        image[i % 8] += 1
        return {"image": image, "label": i % 8}
""",
        "",
        "cross_entropy",
    ),
}
