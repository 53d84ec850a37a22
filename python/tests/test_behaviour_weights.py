"""Whatever reads a weight through its module sees the finished value, in whatever mode it reads."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from checks import F, adam, assert_same, batch, compare, loss_of, mlp, names_of_checks, run_checks, sgd
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

pytestmark = pytest.mark.slow

STEPS = 4


def make_adam():
    model = mlp()
    return model, adam(model.parameters())


def make_sgd():
    model = mlp()
    return model, sgd(model.parameters())


def step_of(model, optimizer, rank, step) -> None:
    optimizer.zero_grad()
    loss_of(model, batch(rank, step, 6, 12)).backward()
    optimizer.step()


def check_readers_right_after_step(rank: int) -> None:
    """Each reader alone, in a run of its own: it must wait for what it reads."""
    x = batch(0, 99, 3, 12)

    def in_grad_mode(read, mode):
        def inside(module):
            with mode():
                return read(module)

        return inside

    readers = {
        "attribute": lambda m: m[0].weight.detach().clone(),
        "last attribute": lambda m: m[4].bias.detach().clone(),
        "getattr": lambda m: getattr(m[2], "weight").detach().clone(),  # noqa: B009
        "parameters": lambda m: [p.detach().clone() for p in m.parameters()],
        "named_parameters": lambda m: {n: p.detach().clone() for n, p in m.named_parameters()},
        "get_parameter": lambda m: m.get_parameter("2.weight").detach().clone(),
        "state_dict": lambda m: {n: v.clone() for n, v in m.state_dict().items()},
        "layer state_dict": lambda m: {n: v.clone() for n, v in m[2].state_dict().items()},
        "_parameters": lambda m: [m[2]._parameters["weight"].detach().clone(), dict(m[4]._parameters)["bias"].detach().clone()],
        "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).detach().clone(),
        "forward": lambda m: m(x).detach(),
        "one layer's forward": lambda m: m[2](batch(0, 98, 3, 24)).detach(),
        "forward without call": lambda m: m[2].forward(batch(0, 98, 3, 24)).detach(),
        "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (x,)).detach(),
        "deepcopy": lambda m: copy.deepcopy(m)(x).detach(),
        "pickle": lambda m: pickle.loads(pickle.dumps(m))(x).detach(),
        "no_grad": in_grad_mode(lambda m: m(x).clone(), torch.no_grad),
        "inference_mode": in_grad_mode(lambda m: m(x) * 1, torch.inference_mode),
        "inference attribute": in_grad_mode(lambda m: m[0].weight * 1, torch.inference_mode),
        "autocast": in_grad_mode(lambda m: m(x).detach(), lambda: torch.autocast("cpu", torch.bfloat16)),
    }
    for name, read in readers.items():

        def loop(model, module, optimizer, read=read):
            out = []
            for step in range(3):
                step_of(model, optimizer, rank, step)
                out.append(read(module))
            return out

        try:
            compare(rank, make_adam, loop)
        except AssertionError as error:
            raise AssertionError(f"reader {name}: {error}") from error


def check_readers_of_optimizer_state(rank: int) -> None:
    readers = {
        "state[p]": lambda m, o: o.state[m[2].weight]["exp_avg"].clone(),
        "state of a held p": lambda m, o: o.state[o.param_groups[0]["params"][0]]["exp_avg_sq"].clone(),
        "get": lambda m, o: o.state.get(o.param_groups[0]["params"][0])["exp_avg_sq"].clone(),
        "values": lambda m, o: [s["exp_avg"].clone() for s in o.state.values()],
        "items": lambda m, o: [s["exp_avg"].clone() for _, s in o.state.items()],
        "len": lambda m, o: len(o.state),
        "in": lambda m, o: o.param_groups[0]["params"][1] in o.state,
        "state_dict": lambda m, o: copy.deepcopy(o.state_dict()),
        "deepcopy": lambda m, o: copy.deepcopy(o).state_dict(),
        "pickle": lambda m, o: pickle.loads(pickle.dumps(o)).state_dict(),
    }
    for name, read in readers.items():

        def loop(model, module, optimizer, read=read):
            out = []
            for step in range(2):
                step_of(model, optimizer, rank, step)
                out.append(read(module, optimizer))
            return out

        try:
            compare(rank, make_adam, loop)
        except AssertionError as error:
            raise AssertionError(f"reader {name}: {error}") from error


def check_averaged_model(rank: int) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def loop(model, module, optimizer):
        plain = AveragedModel(module)
        ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for step in range(STEPS):
            step_of(model, optimizer, rank, step)
            ema.update_parameters(module)
            if step % 2:
                plain.update_parameters(module)
        return [p.detach().clone() for p in (*ema.parameters(), *plain.parameters())]

    compare(rank, make_adam, loop)


def check_copies_train_alone(rank: int) -> None:
    """A copy or a pickle has nothing of ours: it trains, zeroes and is copied again, and the original is not disturbed."""

    def unpickled(module):
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    for duplicate in (copy.deepcopy, unpickled, lambda m: copy.deepcopy(unpickled(copy.deepcopy(m)))):

        def loop(model, module, optimizer, duplicate=duplicate):
            step_of(model, optimizer, rank, 0)
            twin = duplicate(module)
            assert type(twin[0]._parameters) is dict
            own = sgd(twin.parameters())
            out = []
            for step in range(1, 3):
                twin.zero_grad()
                loss_of(twin, batch(rank, step + 70, 6, 12)).backward()
                assert twin[0].weight.grad is not None
                own.step()
                twin.zero_grad(set_to_none=False)
                assert not twin[0].weight.grad.any()
                out.append([p.detach().clone() for p in twin.parameters()])
                step_of(model, optimizer, rank, step)
            return out

        compare(rank, make_adam, loop)


def check_optimizer_copies_step_alone(rank: int) -> None:
    def loop(model, module, optimizer):
        step_of(model, optimizer, rank, 0)
        twin, own = copy.deepcopy((module, optimizer))
        loss_of(twin, batch(rank, 1, 6, 12)).backward()
        own.step()
        own.zero_grad()
        step_of(model, optimizer, rank, 1)
        return [p.detach().clone() for p in twin.parameters()], own.state_dict()

    compare(rank, make_adam, loop)


def check_evaluation_between_steps(rank: int) -> None:
    """eval in no_grad and inference mode; the first update, which makes Adam's state, happens in there."""
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):

        def loop(model, module, optimizer, mode=mode):
            out = []
            for step in range(STEPS):
                step_of(model, optimizer, rank, step)
                module.eval()
                with mode():
                    out.append(module(batch(0, 50 + step, 4, 12)).mean().item())
                    assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
                    assert torch.is_grad_enabled() == (mode is torch.enable_grad)
                module.train()
            assert not any(p.is_inference() for p in module.parameters())
            for state in optimizer.state.values():
                assert not any(v.is_inference() for v in state.values() if isinstance(v, torch.Tensor))
            return out

        compare(rank, make_adam, loop)


def check_autocast(rank: int) -> None:
    """Forward passes in autocast: gates compute in full precision and leave autocast as they found it."""

    def loop(model, module, optimizer):
        out = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.is_autocast_enabled("cpu")
                prediction = model(batch(rank, step, 6, 12))
                assert torch.is_autocast_enabled("cpu")
            assert prediction.dtype is torch.bfloat16
            loss = prediction.float().square().mean()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    compare(rank, make_adam, loop)
    compare(rank, make_sgd, loop)


def check_parametrizations(rank: int) -> None:
    def weight_norm():
        model = mlp()
        parametrizations.weight_norm(model[0])
        parametrizations.spectral_norm(model[2])
        parametrizations.orthogonal(model[4])
        return model, adam(model.parameters())

    def old_weight_norm():
        model = mlp()
        nn.utils.weight_norm(model[0])
        return model, adam(model.parameters())

    def loop(model, module, optimizer):
        out = []
        for step in range(STEPS):
            step_of(model, optimizer, rank, step)
            out.append(module[0].weight.detach().clone())
        if parametrize.is_parametrized(module[0]):
            with parametrize.cached():
                out.append(module(batch(0, 9, 2, 12)).detach())
        return out

    compare(rank, weight_norm, loop)
    compare(rank, old_weight_norm, loop)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cells = kind(12, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.cells(x)[0].mean(1))


def check_recurrent_layers(rank: int) -> None:
    """They keep their weights in a list of their own, beside their parameters."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):

        def make(kind=kind):
            model = Recurrent(kind)
            return model, adam(model.parameters())

        def loop(model, module, optimizer):
            out = []
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, batch(rank, step, 4, 5, 12)).backward()
                optimizer.step()
                with torch.no_grad():
                    out.append(module.cells(batch(0, 9, 2, 5, 12))[0].clone())
            return out

        compare(rank, make, loop)


class Unusual(nn.Module):
    """Reads weights of modules that it does not call, and owns parameters in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.ones(()))
        self.many = nn.ParameterList([nn.Parameter(torch.randn(12) * 0.1) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(12, 12) * 0.1)})
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        h = F.embedding(x, self.table.weight)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.encoder(h) @ self.named["a"]
        for p in self.many:
            h = h + p
        h = F.layer_norm(h, (12,), self.norm.weight, self.norm.bias) * self.scale
        return h @ self.table.weight.T


def check_weights_read_past_their_module(rank: int) -> None:
    def make():
        model = Unusual()
        return model, adam(model.parameters())

    def loop(model, module, optimizer):
        out = []
        for step in range(STEPS):
            x = torch.randint(0, 10, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            module.eval()  # the fast path of the encoder layer reads all weights itself
            with torch.inference_mode():
                out.append(module(x).sum().item())
            module.train()
        return out

    compare(rank, make, loop)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(mlp(12, 24, 12) for _ in range(3))
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(checkpoint_sequential(self.blocks[0], 2, x, use_reentrant=self.reentrant)) if not self.reentrant else self.head(x)


def check_checkpointing(rank: int) -> None:
    for reentrant in (False, True):

        def make(reentrant=reentrant):
            model = Checkpointed(reentrant)
            return model, adam(model.parameters())

        def loop(model, module, optimizer):
            for step in range(STEPS):
                step_of(model, optimizer, rank, step)

        compare(rank, make, loop)


def check_functional_call_trains(rank: int) -> None:
    def loop(model, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            model.zero_grad()
            if model is module:
                out = torch.func.functional_call(module, dict(module.named_parameters()), (batch(rank, step, 6, 12),))
            else:
                out = model(batch(rank, step, 6, 12))
            out.square().mean().backward()
            optimizer.step()

    compare(rank, make_adam, loop)


def check_modules_called_alone(rank: int) -> None:
    """Parts of the model are called past it, as for a feature extractor."""
    import autobyte.torch as ab

    torch.manual_seed(1)
    model = mlp()
    twin = copy.deepcopy(model)
    optimizer, own = adam(model.parameters()), adam(twin.parameters())
    ab.wrap(model, optimizer)
    for step in range(STEPS):
        for m, o in ((model, optimizer), (twin, own)):
            h = m[0](batch(0, step, 6, 12))
            m[4](m[2](h)).square().mean().backward()
            o.step()
            o.zero_grad()
    assert_same(model.state_dict(), twin.state_dict())


def check_parameters_replaced_through_load(rank: int) -> None:
    """load_state_dict and in-place changes through the module come after the pending update, not before."""

    def loop(model, module, optimizer):
        other = {name: torch.full_like(value, 0.01) for name, value in module.state_dict().items()}
        out = []
        for step in range(STEPS):
            step_of(model, optimizer, rank, step)
            if step == 1:
                module.load_state_dict(other)
            elif step == 2:
                with torch.no_grad():
                    for p in module.parameters():
                        p.clamp_(-0.02, 0.02)
            out.append(module[2].weight.detach().clone())
        return out

    compare(rank, make_adam, loop)


def check_the_barrier_on_demand(rank: int) -> None:
    """Held references are up to date after synchronize()."""
    import autobyte.torch as ab

    def loop(model, module, optimizer):
        held = list(module.parameters())
        out = []
        for step in range(STEPS):
            step_of(model, optimizer, rank, step)
            if model is module:
                ab.synchronize(model)
            out.append([p.detach().clone() for p in held])
        return out

    compare(rank, make_adam, loop)


def check_a_stale_weight_is_refused(rank: int) -> None:
    """A forward pass that reads a held reference while its update is pending ends in an error with its name."""
    from checks import raises

    import autobyte.torch as ab

    model = mlp()
    model, optimizer = ab.wrap(model, adam(model.parameters()))
    held = model[2].weight
    step_of(model, optimizer, rank, 0)
    with raises(ab.AutoByteError, "2.weight", "ab.synchronize"):
        F.linear(batch(rank, 1, 6, 24), held).sum().backward()


def check_a_parameter_never_read_through_its_module(rank: int) -> None:
    """It is updated in step(), with one warning."""

    def make():
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(5, 12))
        model.v = nn.Parameter(torch.randn(5))
        model.held = [model.w, model.v]
        model.forward = None
        return model, adam(model.parameters())

    import autobyte.torch as ab

    torch.manual_seed(3)
    model, optimizer = make()
    twin = [p.detach().clone().requires_grad_() for p in model.held]
    own = adam(twin)
    held = list(model.held)
    ab.wrap(model, optimizer)
    for step in range(STEPS):
        for (w, v), o in ((held, optimizer), (twin, own)):
            o.zero_grad()
            F.linear(batch(0, step, 6, 12), w, v).square().mean().backward()
            o.step()
    assert_same([p.detach() for p in held], [p.detach() for p in twin])


CHECKS = names_of_checks(globals())


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_checks(__name__, CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_weights(failures: dict[str, str], check: str) -> None:
    assert not failures[check], failures[check]
