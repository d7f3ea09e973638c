import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.parallel.replicas.gather_batch import gather_batch, gathering
from guava_nb.replica.one_step_check.simulated_gather import SimulatedGather


def loss_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gathers twice, the second time what depends on the first; and uses its own rows beside."""
    own = x @ weight
    mean = gather_batch(own).mean(0)
    spread = gather_batch(own - mean)
    return (own.exp() @ spread.T.cos()).mean()


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 100))
def test_pieces_one_after_another_give_the_gradient_of_the_whole(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    first = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    gather, weight = SimulatedGather(), first.clone().requires_grad_()
    gather.begin(is_whole=True)
    with gathering(gather):
        loss_of(x, weight).backward()
        gather.finish()
        whole, weight.grad = weight.grad, None
        gather.begin(is_whole=False)
        for piece in x.split(sizes):
            gather.begin_piece()
            (loss_of(piece, weight) * len(piece) / len(x)).backward(retain_graph=True)
        gather.finish()
    assert torch.allclose(weight.grad, whole, atol=1e-10, rtol=1e-9)
