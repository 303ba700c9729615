"""A model runner whose rows hold a hash of their tokens and their owner, so that a stale byte shows."""

import zlib

import torch

from engine_wrapper.embedded.model_runner import ModelRunner
from kernels.layout import pool_view
from semblend_trt.plan import PlanKind

# Rotated keys keep their length but for rounding.
_LENGTH_TOLERANCE = 1e-4
INJECTED = "an injected failure"


def owner_number(owner):
    """The number in front of the first row of an adapter and a salt."""
    return zlib.crc32(repr(tuple(owner)).encode()) >> 8


def number_after(number, token):
    """The number of `token` behind a row of `number`: 24 bits, exact in float32."""
    return zlib.crc32(token.to_bytes(4, "little"), number) >> 8


def chain(owner, tokens):
    """The numbers that a cold run writes."""
    numbers = []
    for token in tokens:
        owner = number_after(owner, token)
        numbers.append(owner)
    return numbers


def token_after(number):
    return number % 251


class Rows:
    """One request's rows; `moved` says of each whether it is from another position, `is_cold` that none is."""

    def __init__(self, numbers, prompt_len):
        self.numbers = numbers
        self.moved = [False] * len(numbers)
        self.is_cold = True
        self.prompt_len = prompt_len

    def place(self, numbers, *, moved):
        self.numbers.extend(numbers)
        self.moved.extend([moved] * len(numbers))

    def compute(self, owner, tokens):
        for token in tokens:
            self.place([number_after(self.numbers[-1] if self.numbers else owner, token)], moved=False)


class PatternRunner(ModelRunner):
    """Writes the numbers of computed rows; with `fails_behind` the next forward fails after that share of requests."""

    def attach_pool(self, pool, geometry, max_rows=None):
        self.view = pool_view(pool, geometry)
        self._block_size = geometry.block_size
        self.requests = {}
        self.rows = {}
        self.started_again = self.failed_forwards = self.wrong_tokens = 0
        self.fails_behind = None

    def forward(self, slices, all_rows=False):
        """Raises AssertionError where a request would attend to rows of another, RuntimeError where it is to fail."""
        logits = torch.zeros(len(slices), int(self.config.vocab_size))
        computed = len(slices) if self.fails_behind is None else int(len(slices) * self.fails_behind)
        for row, part in enumerate(slices[:computed]):
            request = self.requests[part.request_id]
            started = request.cached_tokens + request.py_num_connector_matched_tokens
            if request.context_current_position == part.begin == started:
                self._begin(request, part)
            held = self.rows[part.request_id]
            assert len(held.numbers) == part.begin, f"request {part.request_id} would run past unwritten rows"
            self.check(part.block_ids, 0, held.numbers, held.moved)
            held.compute(owner_number(request.root_key), part.token_ids)
            self._write(part.block_ids, part.begin, held.numbers[part.begin :])
            logits[row, token_after(held.numbers[-1])] = 1.0
        if computed < len(slices):
            self.fails_behind = None
            self.failed_forwards += 1
            raise RuntimeError(INJECTED)
        return logits

    def check(self, block_ids, begin, numbers, moved):
        """Compares the rows from position `begin` on; of moved keys, which were rotated, only their length."""
        self._compare(self.view[self._places(block_ids, begin, len(numbers))], numbers, moved)

    def check_donor(self, donor_id, kv):
        """Compares a donor's KV, [layers, 2, kv_heads, tokens, head_dim], with what its request's own rows held."""
        request, tokens = self._request_of(donor_id), kv.shape[3]
        numbers = chain(owner_number(request.root_key), request.all_tokens[:tokens])
        self._compare(kv.permute(3, 0, 1, 2, 4), numbers, [False] * tokens)

    def check_answer(self, rows, tokens):
        """Counts a token of the answer that does not follow from the row before it, and raises AssertionError."""
        for position in range(rows.prompt_len, len(tokens)):
            if tokens[position] != token_after(rows.numbers[position - 1]):
                self.wrong_tokens += 1
                raise AssertionError("an answer of another request's KV")

    def _compare(self, rows, numbers, moved):
        """`rows`: [tokens, layers, 2, kv_heads, head_dim]."""
        expected = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1, 1)
        keys, values, rotated = rows[:, :, 0], rows[:, :, 1], torch.tensor(moved, dtype=torch.bool)
        stale = {"V": values != expected, "K": keys != expected}
        stale["K"][rotated] = False
        lengths = keys[rotated].double().square().mean(-1, keepdim=True).sqrt()
        right = torch.isclose(lengths, expected[rotated].double(), rtol=_LENGTH_TOLERANCE, atol=0.0)
        stale["moved K"] = ~right
        for name, found in stale.items():
            if bool(found.any()):
                self.wrong_tokens += int(found.flatten(1).any(1).sum())
                raise AssertionError(f"{name} holds stale bytes")

    def _begin(self, request, part):
        if (paused := self.rows.get(request.request_id)) is not None:
            self.started_again += 1
            self.check_answer(paused, request.all_tokens)
        plan = None if self.plan_source is None else self.plan_source(part.request_id)
        if plan is not None and plan.kind is PlanKind.DISCOVERY_ONLY:
            plan = None
        exact = part.begin if plan is None else plan.num_computed_tokens
        rows = self.rows[part.request_id] = Rows(
            chain(owner_number(request.root_key), request.all_tokens[:exact]), request.prompt_len
        )
        if plan is not None:
            rows.is_cold = plan.is_exact
            self._fill(rows, request, plan, part.block_ids)

    def _fill(self, rows, request, plan, block_ids):
        for span in plan.spans:
            self._fill_hole(rows, request, span.target_start, block_ids)
            rows.place(self._donated(request, span), moved=span.shift != 0)
        self._fill_hole(rows, request, plan.prefix_end, block_ids)

    def _fill_hole(self, rows, request, end, block_ids):
        begin = len(rows.numbers)
        rows.compute(owner_number(request.root_key), request.all_tokens[begin:end])
        self._write(block_ids, begin, rows.numbers[begin:])

    def _donated(self, request, span):
        """The numbers of a cold run of the donor under the request's owner. Checks that the span's tokens are equal."""
        tokens = self._request_of(span.donor_id).all_tokens[: span.donor_end]
        assert tokens[span.donor_start :] == request.all_tokens[span.target_start : span.target_end], "other tokens' KV"
        return chain(owner_number(request.root_key), tokens)[span.donor_start :]

    def _request_of(self, donor_id):
        return self.requests[int(donor_id.rsplit("-", 1)[1])]

    def _places(self, block_ids, begin, count):
        """Where in `view` rows are, [positions, layers, 2, kv_heads, head_dim]."""
        positions, every = torch.arange(begin, begin + count), slice(None)
        blocks = torch.tensor(block_ids, dtype=torch.int64)[positions // self._block_size]
        return blocks, every, every, every, positions % self._block_size

    def _write(self, block_ids, begin, numbers):
        values = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1, 1, 1)
        self.view[self._places(block_ids, begin, len(numbers))] = values
