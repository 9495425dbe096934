import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from diagnose.recordings import block, fetch, loader, rank, recording
from trainpace.core.errors import TrainpaceError
from trainpace.diagnose import diagnose, loader_cost, split
from trainpace.watch import PARTS, Line, StatedLength


def by_cause(d):
    return {s.cause: s.ms for s in d.shares}


def saving(d, words):
    (found,) = [a for a in (*d.advice, *d.not_worth) if words in a.title]
    return found.saves_ms


def test_slow_loading_is_a_data_verdict():
    blocks = [
        block("plain", data=16, forward=2, backward=3),
        block("cached_batch", forward=2, backward=3),
    ] * 3
    r = rank(data=16, forward=2, backward=3, blocks=blocks, loader=loader(), fetch=fetch())
    d = diagnose(recording(r), epochs=10)
    assert d.verdict == "data"
    assert d.proofs[0].saved_ms == pytest.approx(16)
    # The fewest workers within 3 % of the best: three load a batch in 5.5 ms, the time to compute and receive one.
    assert saving(d, "3 loader workers instead of 0") == pytest.approx(15.5)
    assert saving(d, "offline") == pytest.approx(16)
    assert [a.title for a in (*d.advice, *d.not_worth) if a.at_most] == [
        "prepare samples once, offline"
    ]
    assert d.seconds_an_epoch(16) == pytest.approx(1.6)


def test_worker_saving_is_limited_by_cores_for_cpu_bound_samples():
    blocks = [block("plain", data=16, forward=5), block("cached_batch", forward=5)] * 3
    r = rank(data=16, forward=5, blocks=blocks, loader=loader(), fetch=fetch(), cpus=2)
    d = diagnose(recording(r))
    # 21 ms of work, 5 of them in training, and 1 ms of handover per step: two cores need 11 ms.
    assert saving(d, "instead of 0") == pytest.approx(10)


def test_io_bound_samples_gain_from_more_workers_than_cores():
    blocks = [block("plain", data=60, forward=5), block("cached_batch", forward=5)] * 3
    r = rank(
        data=60,
        forward=5,
        blocks=blocks,
        loader=loader(workers=1),
        fetch=fetch(4, 0.1, in_workers=True),
        cpus=2,
    )
    d = diagnose(recording(r))
    assert max(a.saves_ms for a in d.advice if a.settings.get("num_workers", 0) > 1) > 55


def test_useless_workers_are_not_advised():
    blocks = [block("plain", data=0.1, forward=30), block("cached_batch", forward=30)] * 3
    r = rank(
        data=0.1,
        forward=30,
        blocks=blocks,
        loader=loader(workers=2),
        fetch=fetch(0.2, 0.2, in_workers=True),
    )
    d = diagnose(recording(r))
    assert d.verdict == "compute"
    assert d.advice == ()
    assert any("worker" in a.title for a in d.not_worth)


def few_and_full(few, full, rounds=2):
    return [block("plain", forward=full)] * 3 + [
        block("few_samples", forward=few),
        block("cached_batch", forward=full),
    ] * rounds


def test_batch_independent_time_counts_as_launch():
    r = rank(forward=10, blocks=few_and_full(9, 10))
    causes = by_cause(diagnose(recording(r)))
    assert causes["launch"] == pytest.approx(9 - 2 / 14, abs=0.01)
    assert causes["launch"] + causes["compute"] == pytest.approx(10)


def test_loop_over_samples_counts_as_launch():
    r = rank(
        forward=10,
        blocks=few_and_full(1.3, 10),
        operators=2000,
        few_operators=250,
        large_operators_ms=0.5,
    )
    d = diagnose(recording(r))
    assert d.verdict == "launch"
    assert by_cause(d)["launch"] == pytest.approx(9.5)
    assert saving(d, "all samples of a batch at once") == pytest.approx(9.5 * 15 / 16)
    assert not any(
        "times as large" in a.title for a in (*d.advice, *d.not_worth)
    )  # Large batches lengthen a loop.


def test_large_operators_count_as_compute_at_any_batch():
    r = rank(
        forward=10, blocks=few_and_full(9, 10), large_operators_ms=9.4
    )  # a dense gradient of a large embedding
    d = diagnose(recording(r))
    assert d.verdict == "compute"
    assert by_cause(d)["launch"] == pytest.approx(0.6)


def test_later_slowdown_does_not_count_as_launch():
    """One fast block of 10 ms, 9 of them in operators; later blocks take three times as long."""
    blocks = [block("plain", forward=each) for each in (10, 30, 50, 30)]
    d = diagnose(
        recording(rank(forward=30, blocks=blocks, large_operators_ms=9.0, delayed_share=0.4))
    )
    assert d.verdict == "compute"
    assert by_cause(d)["launch"] == pytest.approx(3)
    assert any("waited for a core in 40% of its time" in note for note in d.warnings)


def test_failure_in_small_batch_trial_is_explained():
    failed = recording(rank(forward=10, ended_in="few_samples"), exit_code=1)
    assert "batches of 2 samples" in diagnose(failed).warnings[0]
    assert (
        "batches of 2 samples"
        not in diagnose(recording(rank(forward=10, ended_in="muted"), exit_code=1)).warnings[0]
    )


def test_exit_code_after_all_trials_gives_launcher_warning():
    carried_out = diagnose(recording(rank(forward=10, carried_out=True), exit_code=1))
    assert "Ray" in carried_out.warnings[0]
    assert "Ray" not in diagnose(recording(rank(forward=10), exit_code=1)).warnings[0]


def test_slow_own_line_gets_advice():
    seen = Line(
        part="other", line="/usr/lib/utils.py:281 save_image", called="PIL.Image.save", share=0.9
    )
    d = diagnose(recording(rank(forward=10, other=20, lines=(seen,))))
    assert saving(d, "less of utils.py:281 save_image") == pytest.approx(18)
    trains = Line(part="forward", line=seen.line, called="", share=1.0)
    for lines in ((replace(seen, share=0.15),), (seen, trains)):
        assert not diagnose(recording(rank(forward=10, other=20, lines=lines))).advice


def test_larger_batch_shares_fastest_optimizer():
    r = rank(
        forward=10,
        optimizer=5,
        loader=loader(),
        optimizer_variants_ms={"as it is": 5.0, "fused": 4.0},
    )
    assert saving(diagnose(recording(r)), "a batch 4 times as large") == pytest.approx(4 * 0.75)
    assert not [
        a
        for a in diagnose(recording(replace(r, samples_per_step=0.0))).advice
        if "batch" in a.title
    ]


def test_compute_is_not_proved_on_oversubscribed_machine():
    r = rank(forward=10, blocks=[block("plain", forward=10)] * 3, large_operators_ms=9.0)
    for share, proved in ((0.01, True), (0.4, False)):
        d = diagnose(recording(replace(r, delayed_share=share)))
        assert next(s.proved for s in d.shares if s.cause == "compute") is proved


def test_oversubscribed_threads_get_advice():
    ranks = [rank(i, 2, forward=10, threads=4, cpus=4, delayed_share=0.4) for i in range(2)]
    assert saving(
        diagnose(recording(*ranks)), "2 threads per process instead of 4"
    ) == pytest.approx(4)
    hogwild = rank(forward=10, threads=4, cpus=4, delayed_share=0.4, beside=3)
    assert saving(
        diagnose(recording(hogwild)), "1 thread per process instead of 4"
    ) == pytest.approx(4)
    by_script = diagnose(recording(replace(hogwild, threads_by="/x/train.py:17 main")))
    assert "/x/train.py:17" in by_script.advice[0].how
    assert not any(
        "thread" in a.title
        for a in diagnose(recording(*(replace(r, threads=2) for r in ranks))).advice
    )


def with_fewer_threads(plain, fewer, **more):
    blocks = [
        block("plain", forward=plain, optimizer=4),
        block("fewer_threads", forward=fewer, optimizer=1),
    ] * 3
    return rank(
        forward=plain, optimizer=4, blocks=blocks, fewer_threads=1, threads=2, cpus=2, **more
    )


def test_fewer_threads_trial_proves_thread_contention():
    d = diagnose(recording(with_fewer_threads(40, 10, beside=1)))
    assert d.verdict == "threads"
    assert by_cause(d)["threads"] == pytest.approx(33)
    assert by_cause(d)["compute"] == pytest.approx(10)
    assert by_cause(d)["optimizer"] == pytest.approx(1)
    assert next(s.proved for s in d.shares if s.cause == "threads")
    assert saving(d, "1 thread per process instead of 2") == pytest.approx(33)
    assert "2 processes of 2 threads each share 2 cores" in d.advice[0].how
    assert any("1 thread per process" in line for line in d.why)
    (tried,) = d.proofs
    assert (tried.trial, tried.plain_ms, tried.without_ms) == ("fewer_threads", 44, 11)
    assert (
        "Other programs use the 2 cores too"
        in diagnose(recording(with_fewer_threads(40, 10))).advice[0].how
    )


def test_slower_fewer_threads_trial_rules_out_thread_contention():
    d = diagnose(recording(with_fewer_threads(40, 60)))
    assert d.verdict == "compute"
    assert by_cause(d)["threads"] == 0
    assert not any("thread" in a.title for a in d.advice)


def test_advice_worth_is_relative_to_uncontended_step():
    """The faster optimizer saves 0.9 of 1 ms: little of 441 ms, much of 11 ms."""
    r = with_fewer_threads(440, 10, optimizer_variants_ms={"as it is": 1.0, "fused": 0.1})
    d = diagnose(recording(r))
    assert [a.title for a in d.advice][1:] == ["(fused)"]


def test_launch_share_is_limited_on_oversubscribed_machine():
    r = rank(forward=1000, operators=400, large_operators_ms=300.0)
    assert by_cause(diagnose(recording(r)))["launch"] == pytest.approx(700)
    d = diagnose(recording(replace(r, delayed_share=0.4)))
    assert d.verdict == "compute"
    assert by_cause(d)["launch"] == pytest.approx(40)


def test_single_sample_training_gets_batch_advice():
    one = {
        "forward_flops": 100.0,
        "product_flops": 100.0,
        "one_row_flops": 80.0,
        "products_ms": 7.5,
        "large_operators_ms": 10.0,
    }
    r = rank(forward=10, optimizer=2, samples=0.0, **one)
    d = diagnose(recording(r))
    assert d.verdict == "compute"
    assert saving(d, "a batch of 4 instead of single samples") == pytest.approx((6 + 2) * 3 / 4)
    (advice,) = d.advice
    assert (
        "80% of a forward pass's FLOPs are in products of a matrix with a single vector"
        in advice.how
    )
    assert advice.at_most
    assert "One at a time, torch.compile launches fewer operators." in advice.how
    (reading,) = diagnose(recording(replace(r, values_read=40))).advice
    assert "torch.compile" not in reading.how
    assert not diagnose(recording(replace(r, one_row_flops=20.0))).advice
    # A convolutional network that multiplies one vector, such as a time of day or a style.
    assert not diagnose(recording(replace(r, forward_flops=10_000.0))).advice


def test_single_sample_loader_gets_one_batch_advice():
    one = {
        "forward_flops": 100.0,
        "product_flops": 100.0,
        "one_row_flops": 100.0,
        "operators": 50,
        "large_operators_ms": 1.0,
    }
    r = rank(forward=10, samples=1.0, loader=loader(batch_size=1), **one)
    titles = [a.title for a in diagnose(recording(r)).advice]
    assert "a batch of 4 instead of single samples" in titles
    assert "a batch 4 times as large" not in titles


def test_oversubscribed_step_interval_includes_quickest_block():
    r = rank(forward=30, blocks=[block("plain", forward=ms) for ms in (10, 30, 50)])
    assert diagnose(recording(r)).step_ms_low > 20
    assert diagnose(recording(replace(r, delayed_share=0.4))).step_ms_low == 10


def test_job_length_names_its_source():
    by = StatedLength(30, None, "epochs = 30 in train.py")
    assert (
        diagnose(recording(rank(forward=10, stated=by, loader=loader()))).job_by
        == "epochs = 30 in train.py"
    )
    assert diagnose(recording(rank(forward=10, stated=by, loader=loader())), epochs=2).job_by == ""


def test_job_length_comes_from_stated_steps_or_epochs():
    steps, epochs = (
        StatedLength(None, 500, "--max-steps 500"),
        StatedLength(30, None, "epochs = 30 in train.py"),
    )
    by_steps = diagnose(recording(rank(forward=10, stated=steps, loader=loader())))
    assert (by_steps.job_steps, by_steps.epochs, by_steps.seconds_a_job(2.0)) == (500, 5, 1.0)
    assert (
        diagnose(recording(rank(forward=10, stated=steps))).job_steps == 500
    )  # a stream, whose epochs have no length
    assert diagnose(recording(rank(forward=10, stated=epochs, loader=loader()))).job_steps == 3000
    assert diagnose(recording(rank(forward=10, stated=epochs))).job_steps is None
    assert (
        diagnose(recording(rank(forward=10, stated=steps, loader=loader())), epochs=2).job_steps
        == 200
    )


def test_script_gives_the_steps_of_epochs_in_the_command():
    by_script = StatedLength(200, 600, "epochs = 200 in train.py")
    watched = replace(
        recording(rank(forward=10, stated=by_script)), command=("train.py", "--epochs", "200")
    )
    assert diagnose(watched).job_steps == 600
    loaded = replace(watched, ranks=(rank(forward=10, stated=by_script, loader=loader()),))
    assert diagnose(loaded).job_steps == 20_000
    assert diagnose(loaded).job_by == "--epochs 200"


def test_endless_dataset_has_no_epoch_length():
    d = diagnose(recording(rank(forward=10, loader=loader(batches=10**11))))
    assert d.steps_per_epoch is None
    assert "endless" in d.warnings[-1]
    assert (
        diagnose(recording(rank(forward=10, loader=loader(batches=10**9)))).steps_per_epoch == 10**9
    )


def test_lag_within_noise_is_not_a_straggler():
    def ranks(*behind_ms):
        blocks = [[], []]
        for ms in behind_ms:
            for i, free in enumerate((10 + ms, 10)):
                blocks[i] += [
                    block("plain", forward=11 + max(ms, 0)),
                    block("no_sync", forward=free),
                ]
        return [rank(i, 2, forward=12, blocks=blocks[i]) for i in range(2)]

    assert split(ranks(2.0, 2.1, 1.9)).by_cause["straggler"] == pytest.approx(2)
    assert split(ranks(6.0, -3.0, 3.0)).by_cause["straggler"] == 0


def two_ranks(first, second, plain, free_first, free_second, **more):
    ranks = []
    for i, (own, free) in enumerate(((first, free_first), (second, free_second))):
        blocks = [block("plain", **plain[i]), block("no_sync", **free)] * 3
        ranks.append(rank(i, 2, blocks=blocks, **own, **more))
    return ranks


def test_communication_inside_backward_is_found():
    own = {"forward": 10, "backward": 90}
    ranks = two_ranks(
        own, own, [own, own], {"forward": 10, "backward": 30}, {"forward": 10, "backward": 30}
    )
    d = diagnose(recording(*ranks))
    assert d.verdict == "communication"
    assert by_cause(d)["communication"] == pytest.approx(60)
    assert by_cause(d)["compute"] == pytest.approx(40)
    assert saving(d, "twice as many micro-steps") == pytest.approx(30)


def exchanging_all_the_same(*saved_ms, **more):
    """Two ranks that communicate for 20 of 33 ms, and still communicate in no-sync steps.

    Each no-sync step is shorter by one of `saved_ms`, in the order of rounds.
    """
    own = {"forward": 5, "backward": 8, "communication": 20}
    ranks = []
    for i in range(2):
        blocks = []
        for ms in saved_ms:
            blocks += [block("plain", **own), block("no_sync", **(own | {"backward": 8 - ms}))]
        ranks.append(rank(i, 2, blocks=blocks, **own, **more))
    return ranks


@pytest.mark.parametrize("saved_ms", [(1.4, 1.5, 1.6), (0.0, 0.1, -0.1), (-1.4, -1.5, -1.6)])
def test_noisy_remaining_communication_is_found_but_not_proved(saved_ms):
    d = diagnose(recording(*exchanging_all_the_same(*saved_ms, large_operators_ms=3.0)))
    assert d.verdict == "communication"
    assert by_cause(d)["communication"] == pytest.approx(20, abs=1.6)
    assert not next(s for s in d.shares if s.cause == "communication").proved
    assert not any("no exchange between ranks" in line for line in d.why)  # there was some
    assert sum(by_cause(d).values()) == pytest.approx(33)


@pytest.mark.parametrize(("left_in", "proved"), [(4, True), (16, False)])
def test_communication_is_proved_if_trial_removes_most(left_in, proved):
    own, free = {"forward": 10, "communication": 30}, {"forward": 10, "communication": left_in}
    d = diagnose(recording(*two_ranks(own, own, [own, own], free, free)))
    (found,) = [s for s in d.shares if s.cause == "communication"]
    assert (found.ms, found.proved) == (pytest.approx(30), proved)


def test_straggler_is_found_despite_remaining_communication():
    own = ({"forward": 5, "communication": 20}, {"forward": 20, "communication": 5})
    ranks = two_ranks(*own, own, *own)
    assert by_cause(diagnose(recording(*ranks)))["straggler"] == pytest.approx(15)
    assert by_cause(diagnose(recording(*ranks)))["communication"] == pytest.approx(5)


def test_device_communication_is_time_saved_without_sync():
    own, free = {"forward": 5, "communication": 50}, {"forward": 5, "communication": 30}
    ranks = two_ranks(own, own, [own, own], free, free, accelerator="GPU")
    assert split(ranks).by_cause["communication"] == pytest.approx(20)


def test_accumulation_without_no_sync_gets_advice():
    own = {"forward": 10, "backward": 90}
    free = {"forward": 10, "backward": 30}
    ranks = two_ranks(own, own, [own, own], free, free, micro_steps=4.0)
    assert saving(diagnose(recording(*ranks)), "once a step") == pytest.approx(45)
    ranks = two_ranks(own, own, [own, own], free, free, micro_steps=4.0, skips_sync=True)
    assert not [a for a in diagnose(recording(*ranks)).advice if "once a step" in a.title]


def test_several_backward_passes_of_one_batch_count_once():
    own, free = {"forward": 10, "backward": 90}, {"forward": 10, "backward": 30}
    ranks = two_ranks(
        own, own, [own, own], free, free, micro_steps=3.0, samples=15.8, loader=loader()
    )  # a GAN's step
    d = diagnose(recording(*ranks))
    assert d.steps_per_epoch == pytest.approx(100)
    assert not [a for a in (*d.advice, *d.not_worth) if "once a step" in a.title]


def test_steps_per_epoch_use_micro_steps_if_samples_unknown():
    r = rank(forward=10, micro_steps=4.0, samples=0.0, loader=loader())
    assert diagnose(recording(r)).steps_per_epoch == pytest.approx(25)


def test_data_savings_stay_below_mean_wait_of_ranks():
    ranks = [
        rank(i, 2, data=wait, forward=5, loader=loader(), fetch=fetch())
        for i, wait in enumerate((16, 0.5))
    ]
    d = diagnose(recording(*ranks))
    assert all(a.saves_ms <= a.ceiling_ms for a in (*d.advice, *d.not_worth))
    assert by_cause(d)["data"] == pytest.approx(8.25)


def test_larger_batch_saving_is_below_its_ceiling_with_ranks():
    own, free = {"forward": 10, "backward": 90}, {"forward": 10, "backward": 10}
    ranks = two_ranks(own, own, [own, own], free, free, large_operators_ms=2.0)
    (a,) = [a for a in diagnose(recording(*ranks)).advice if a.cause == "launch"]
    assert 0 < a.saves_ms == pytest.approx(0.75 * a.ceiling_ms)


def test_saving_of_forty_first_worker_is_computed():
    r = rank(
        data=25,
        forward=5,
        loader=loader(workers=40),
        fetch=fetch(60, 0.1, in_workers=True),
        cpus=64,
    )
    assert saving(diagnose(recording(r)), "41 loader workers instead of 40") == pytest.approx(
        60 * 16 / 40 - 60 * 16 / 41
    )


def test_launch_bound_accumulation_gets_single_micro_batch_advice():
    blocks = few_and_full(9, 10)
    r = rank(
        forward=10, blocks=blocks, operators=600, micro_steps=4.0, samples=64.0, loader=loader()
    )
    d = diagnose(recording(r))
    assert d.verdict == "launch"
    assert saving(d, "one micro-batch of 64 samples instead of 4 micro-batches") == pytest.approx(
        0.75 * by_cause(d)["launch"]
    )
    assert not any("times as large" in a.title for a in d.advice)


def test_busy_cores_get_no_advice_for_more_workers():
    """Two workers and the training share two cores. A third worker would not shorten the short waits."""
    r = rank(
        data=5,
        forward=10,
        backward=10,
        loader=loader(workers=2),
        fetch=fetch(2, 1.5, in_workers=True),
        cpus=2,
        threads=2,
    )
    d = diagnose(recording(r))
    assert saving(d, "3 loader workers instead of 2") == 0
    assert any("keep 1.0 of 2 cores busy" in line for line in d.why)
    # Without workers, compute would have 50 % more cores.
    assert saving(d, "offline") == pytest.approx(5 + 20 * (16 * 1.5 / 25) / 2)
    roomy = diagnose(recording(replace(r, cpus=8)))
    assert not any("cores busy" in line for line in roomy.why)
    assert saving(roomy, "offline") == pytest.approx(5)


@pytest.mark.parametrize(
    ("threads", "accelerator", "wall", "saved"),
    [(1, "", 5, 4.5), (2, "", 5, 0), (2, "", 15, 9.5), (2, "NVIDIA T4", 5, 4.5)],
)
def test_worker_saving_subtracts_cpu_time_on_full_cores(threads, accelerator, wall, saved):
    """Loading takes 5 ms of CPU time; waiting in a worker, as for a disk, uses no core."""
    r = rank(
        data=wall,
        forward=15,
        loader=loader(),
        fetch=fetch(wall / 16, 5 / 16),
        cpus=2,
        threads=threads,
    )
    r = replace(r, accelerator=accelerator)
    found = saving(diagnose(recording(r)), "1 loader worker instead of 0")
    assert found == pytest.approx(saved, abs=0.6)  # sending and handing over take 0.5 ms each


def test_worker_saving_counts_shared_cores():
    r = rank(data=34, forward=6, loader=loader(), fetch=fetch(34 / 16, 34 / 16), cpus=2, threads=2)
    assert saving(diagnose(recording(r)), "2 loader workers instead of 0") == pytest.approx(
        34 - 4 * 6 - 10 / 2, abs=0.5
    )


def test_job_epochs_come_from_command_or_script():
    r = rank(
        data=5,
        forward=15,
        loader=loader(batches=100),
        fetch=fetch(),
        stated=StatedLength(None, 250, "max_iters"),
    )
    assert diagnose(recording(r)).epochs == 2.5
    assert (
        diagnose(replace(recording(r), command=("python", "train.py", "--epochs", "7"))).epochs == 7
    )
    assert diagnose(recording(r), epochs=3).epochs == 3
    assert diagnose(recording(replace(r, stated=None))).epochs is None


@pytest.mark.parametrize(
    ("share", "title", "saved"),
    [(0.01, "evaluation every second epoch", 5), (0.1, "evaluation 1/10", 9)],
)
def test_rare_evaluation_is_halved_and_frequent_one_cut_to_tenth(share, title, saved):
    r = rank(evaluation=10, forward=10, loader=loader(), occasions={"evaluation": share})
    assert saving(diagnose(recording(r)), title) == pytest.approx(saved)


def test_busy_machine_lowers_step_interval():
    alone = recording(rank(forward=10, delayed_share=0.25))
    assert diagnose(alone).step_ms_low == pytest.approx(9.8)
    beside = diagnose(replace(alone, busy="other programs keep all 2 cores busy."))
    assert (beside.step_ms_low, beside.step_ms_high) == pytest.approx((0.75 * 9.8, 10.2))


@pytest.mark.parametrize(
    ("workers", "noise", "slowed"), [(2, 0.2, 6.0), (2, 20.0, 0.0), (0, 0.2, 0.0)]
)
def test_contention_with_loader_workers_is_separated(workers, noise, slowed):
    """With a cached batch the workers idle, and forward and backward take 14 ms instead of 20 ms."""
    blocks = [
        made
        for wobble in (-noise, 0, noise)
        for made in (
            block("plain", data=1, forward=8 + wobble, backward=12),
            block("cached_batch", forward=5, backward=9),
        )
    ]
    r = rank(
        data=1,
        forward=8,
        backward=12,
        blocks=blocks,
        loader=loader(workers=workers),
        fetch=fetch(2, 1.5, in_workers=True),
    )
    d = diagnose(recording(r))
    assert by_cause(d)["contention"] == pytest.approx(slowed)
    assert sum(by_cause(d).values()) == pytest.approx(d.step_ms)
    if slowed:
        assert saving(d, "offline") == pytest.approx(1 + slowed)


def test_ddp_counters_cover_only_synchronized_backward_passes():
    ddp = {"avg_backward_comm_time": 20e6, "avg_backward_compute_comm_overlap_time": 10e6}
    ranks = [
        rank(i, 2, forward=10, backward=90, ddp=ddp, micro_steps=4.0, skips_sync=True)
        for i in range(2)
    ]
    assert by_cause(diagnose(recording(*ranks)))["communication"] == pytest.approx(10)
    ranks = [replace(r, skips_sync=False) for r in ranks]
    assert by_cause(diagnose(recording(*ranks)))["communication"] == pytest.approx(40)


def test_straggler_is_named_with_its_slow_part():
    fast, slow = {"forward": 10, "backward": 60}, {"forward": 50, "backward": 20}
    ranks = two_ranks(
        fast, slow, [fast, slow], {"forward": 10, "backward": 18}, {"forward": 50, "backward": 18}
    )
    d = diagnose(recording(*ranks))
    assert d.verdict == "straggler"
    assert by_cause(d)["straggler"] == pytest.approx(40)
    assert by_cause(d)["communication"] == pytest.approx(2)
    (advice,) = [a for a in d.advice if a.cause == "straggler"]
    assert "rank 1" in advice.title
    assert "40 of them in forward" in advice.how


def test_ddp_counters_are_used_without_interventions():
    ddp = {"avg_backward_comm_time": 70e6, "avg_backward_compute_comm_overlap_time": 10e6}
    d = diagnose(recording(*(rank(i, 2, forward=10, backward=90, ddp=ddp) for i in range(2))))
    assert d.verdict == "communication"
    assert by_cause(d)["communication"] == pytest.approx(60)
    assert not any(s.proved for s in d.shares)


def test_data_wait_counts_beyond_device_work():
    # Recorded: ResNet-50 on an H100 with two slow loader workers. A step without data took 73 of 187 ms.
    d = diagnose(
        recording(
            rank(data=161, forward=9, backward=12, optimizer=2, logging=3, device_busy_ms=70.0)
        )
    )
    assert d.verdict == "data"
    assert by_cause(d)["data"] == pytest.approx(117)
    assert by_cause(d)["compute"] == pytest.approx(70)


def test_waiting_for_busy_device_counts_as_compute():
    # The same with loss.item() in every step. The device idles only while the next step is launched.
    d = diagnose(
        recording(
            rank(
                synchronisation=47,
                forward=10,
                backward=14,
                optimizer=2,
                other=1,
                device_busy_ms=68.0,
            )
        )
    )
    assert d.verdict == "compute"
    assert by_cause(d)["logging"] == pytest.approx(6)
    assert saving(d, "log every") <= 6


def test_idle_device_means_launch_bound():
    d = diagnose(
        recording(rank(host_to_device=1, forward=20, backward=25, optimizer=4, device_busy_ms=12.0))
    )
    assert d.verdict == "launch"
    assert by_cause(d)["launch"] == pytest.approx(37 * 45 / 49)
    assert by_cause(d)["optimizer"] == pytest.approx(37 * 4 / 49)  # whose launches are its own
    assert by_cause(d)["host_to_device"] == pytest.approx(1)


@given(
    st.fixed_dictionaries({p: st.floats(0, 100) for p in PARTS}),
    st.floats(0.01, 50),
    st.none() | st.floats(0.01, 2000),
    st.floats(0, 50),
    st.floats(0, 1),
)
@example(
    {
        **dict.fromkeys(PARTS, 0.0),
        "optimizer": 1.002565929471487,
        "synchronisation": 70.0,
        "logging": 100.0,
        "trainpace": 100.0,
    },
    15.0,
    459.0,
    0.0,
    1.0,
)
def test_shares_sum_to_step_time(ms, forward, busy_ms, update_ms, copied):
    ms["forward"] += forward
    device = {"device_busy_ms": busy_ms, "device_copies_ms": copied * (busy_ms or 0.0)}
    d = diagnose(recording(rank(**ms, **device, optimizer_variants_ms={"as it is": update_ms})))
    assert sum(s.ms for s in d.shares) == pytest.approx(sum(ms.values()))
    assert all(s.ms >= 0 for s in d.shares)
    assert d.shares[0].ms == max(s.ms for s in d.shares)
    assert all(0 <= a.saves_ms <= a.ceiling_ms * 1.001 + 1e-9 for a in (*d.advice, *d.not_worth))


@pytest.mark.parametrize(
    "cause", ["logging", "checkpoint", "evaluation", "optimizer", "host_to_device"]
)
def test_each_recorded_part_can_be_the_verdict(cause):
    d = diagnose(recording(rank(**{cause: 20}, forward=5, backward=5)))
    assert d.verdict == cause
    assert d.shares[0].ms == pytest.approx(20)


def test_loader_start_counts_as_data_with_own_advice():
    d = diagnose(
        recording(
            rank(loader_start=20, forward=5, loader=loader(workers=2), fetch=fetch(in_workers=True))
        )
    )
    assert d.verdict == "data"
    assert saving(d, "keep the loader's workers") == pytest.approx(20)


def test_optimizer_advice_names_measured_faster_variant():
    variants = {"as it is": 8.0, "fused": 2.0, "foreach": 7.9}
    d = diagnose(recording(rank(forward=1, backward=1, optimizer_variants_ms=variants)))
    assert not [a for a in d.advice if a.cause == "optimizer"]  # This part takes no time.
    r = rank(forward=1, backward=1, optimizer=8, optimizer_variants_ms=variants)
    d = diagnose(recording(replace(r, optimizer="AdamW")))
    assert d.verdict == "optimizer"
    assert d.advice[0].title == "AdamW(fused)"
    assert d.advice[0].saves_ms == pytest.approx(6)


def test_run_without_steps_is_an_error():
    with pytest.raises(TrainpaceError, match=r"no training step.*3 model calls.*exit code 1"):
        diagnose(recording(seen="seen: 3 model calls.", exit_code=1))


def test_odd_recordings_have_warnings():
    d = diagnose(
        recording(rank(world_size=4, forward=5, complete=False, allocator_retries=3.0), exit_code=1)
    )
    said = " ".join(d.warnings)
    assert all(words in said for words in ("exit code 1", "killed", "1 of 4 ranks", "memory"))


def test_cheap_batches_get_no_worker_advice():
    blocks = [block("plain", data=0.1, forward=0.1), block("cached_batch", forward=0.1)] * 3
    d = diagnose(
        recording(
            rank(data=0.1, forward=0.1, blocks=blocks, loader=loader(), fetch=fetch(0.006, 0.006))
        )
    )
    assert not [a for a in d.advice if a.cause == "data"]


def test_few_operators_are_not_a_loop_over_samples():
    r = rank(
        forward=10,
        blocks=few_and_full(1.3, 10),
        operators=40,
        few_operators=40,
        large_operators_ms=0.5,
        loader=loader(),
    )
    d = diagnose(recording(r))
    assert not any("all samples of a batch at once" in a.title for a in (*d.advice, *d.not_worth))
    assert saving(d, "a batch 4 times as large") > 0


def test_no_batch_advice_without_batches():
    r = rank(
        forward=10, samples=0.0, operators=300, large_operators_ms=2.0
    )  # a whole graph in every step
    (advice,) = (a for a in diagnose(recording(r)).advice if a.cause == "launch")
    assert "torch.compile" in advice.title
    assert "batch 4 times" not in advice.title
    assert advice.saves_ms <= advice.ceiling_ms == pytest.approx(8)


@pytest.mark.parametrize(
    ("plain", "without", "proved"),
    [
        ([20, 21, 20], [12, 12, 13], True),  # data cost 8 ms, beyond the noise
        ([20, 90, 21], [12, 14, 80], False),  # a machine that others keep busy
        ([20, 20, 20], [20, 19.9, 20.1], True),  # data cost nothing, which a narrow interval shows
        ([20], [12], False),  # One repeat proves nothing.
    ],
)
def test_intervention_proves_share_only_beyond_its_interval(plain, without, proved):
    pairs = [
        b
        for p, w in zip(plain, without, strict=True)
        for b in (block("plain", forward=p), block("cached_batch", forward=w))
    ]
    r = rank(data=8, forward=12, blocks=pairs, loader=loader(), fetch=fetch())
    d = diagnose(recording(r))
    assert next(s for s in d.shares if s.cause == "data").proved is proved
    assert d.proofs[0].settles is proved


def test_slow_operators_are_named_with_source_lines():
    slow = (
        ("aten.nonzero", "/a/layers.py:101 forward", 0.46),
        ("aten.mm", "", 0.34),
        ("aten.relu", "/a/b.py:1 f", 0.02),
    )
    said = "Of all operators' time, 46% is aten::nonzero (layers.py:101 forward), 34% is aten::mm (backward)."
    assert said in diagnose(recording(rank(forward=10, slow_operators=slow))).why
    assert said not in diagnose(recording(rank(forward=10, other=90, slow_operators=slow))).why


def test_rarer_evaluation_is_advised_relative_to_the_present_rhythm():
    """An epoch has 100 steps, and every second epoch is evaluated."""
    r = rank(forward=10, evaluation=10, loader=loader(), occasions={"evaluation": 1 / 200})
    titles = [a.title for a in diagnose(recording(r)).advice]
    assert "evaluation half as often (every 4 epochs)" in titles


def test_an_epoch_left_early_is_as_long_as_it_was_seen():
    r = rank(forward=10, loader=loader(), epoch_steps=20.0)
    assert diagnose(recording(r)).steps_per_epoch == 20


def test_collecting_experience_is_named_and_to_be_done_in_parallel():
    line = Line(part="other", line="/x/train.py:17 collect", called="", share=1.0)
    d = diagnose(recording(rank(forward=1, other=10, lines=(line,), collects_experience=True)))
    assert d.shares[0].in_words.startswith("collecting experience")
    assert d.advice[0].title == "collect faster at train.py:17 collect"


def workers_save_ms(r):
    advice = diagnose(recording(r)).advice
    return next((a.saves_ms for a in advice if "num_workers" in a.settings), 0.0)


def test_workers_share_the_wait_for_storage_but_not_the_wait_for_cores():
    """Making a batch takes 80 of 90 ms, of which 20 are on one of the two cores."""
    r = rank(data=80, forward=10, loader=loader(), fetch=fetch(wall=5, cpu=1.25), cpus=2)
    assert workers_save_ms(r) > 0.7 * 90
    busy = replace(r, delayed_share=0.75)
    assert 0.3 * 90 < workers_save_ms(busy) <= 0.5 * 90
    assert [loader_cost(one).sample_wall_ms for one in (r, busy)] == pytest.approx([5, 1.25])
    in_workers = replace(busy, loader=loader(workers=1), fetch=fetch(5, 1.25, in_workers=True))
    assert loader_cost(in_workers).sample_wall_ms == 5


def test_two_cores_make_collated_batches_at_most_twice_as_fast():
    r = rank(data=80, forward=10, loader=loader(), fetch=fetch(0.1, 0.1, collate=78.4), cpus=2)
    assert 0.3 * 90 < workers_save_ms(r) <= 0.5 * 90


def test_workers_do_not_shorten_unexplained_waits():
    """Samples account for 2 of the 10 ms of waiting."""
    r = rank(forward=10, data=10, loader=loader(), fetch=fetch(wall=0.125, cpu=0.0), cpus=2)
    assert saving(diagnose(recording(r)), "1 loader worker instead of 0") <= 2


def test_evaluation_with_gradients_gets_no_grad_hint():
    r = rank(forward=10, evaluation=5, evaluates_with_gradients=True)
    assert "torch.no_grad()" in diagnose(recording(r)).advice[0].how
    assert (
        "no_grad"
        not in diagnose(recording(replace(r, evaluates_with_gradients=False))).advice[0].how
    )


def test_padding_gets_advice():
    d = diagnose(recording(rank(forward=100, tokens=(40, 60, 100))))
    assert saving(d, "padding to the longest sample of each batch") == pytest.approx(40)
    assert saving(d, "batches of samples of similar lengths") == pytest.approx(60)
    assert all("60% of the positions in a batch are padding" in a.how for a in d.advice)
    # The Trainer's setting has another name in each version, and ends it for other samples.
    assert [a.settings for a in d.advice] == [{}, {"padding": "longest"}]
    dynamic = diagnose(recording(rank(forward=100, tokens=(60, 100, 100))))
    assert [a.title for a in dynamic.advice] == ["batches of samples of similar lengths"]
    assert not diagnose(recording(rank(forward=100, tokens=(95, 100, 100)))).advice
    assert not diagnose(recording(rank(forward=100))).advice


def test_page_faults_get_advice():
    r = rank(forward=100, page_faults=10_000.0, page_fault_ns=1500.0)
    d = diagnose(recording(r))
    assert saving(d, "keep freed memory") == pytest.approx(15)
    assert "A step has 10,000 page faults, 1.5 us each" in d.advice[0].how
    for other in (
        replace(r, page_faults=1000.0),
        replace(r, accelerator="cuda"),
        rank(forward=100),
    ):
        assert not any("memory" in a.title for a in diagnose(recording(other)).advice)


def test_short_epochs_include_worker_start():
    """Based on a graph data set with epochs of 11 steps of 12 ms, where a worker made training slower."""
    r = rank(
        forward=7, data=5, loader=loader(batches=11), fetch=fetch(wall=5 / 16, cpu=0.0), cpus=2
    )
    assert saving(diagnose(recording(r)), "1 loader worker instead of 0") < 0.5
    long = diagnose(recording(replace(r, loader=loader(batches=1100))))
    assert saving(long, "1 loader worker instead of 0") > 4


def test_more_workers_than_cores_may_wait_for_a_core():
    r = rank(
        data=30, forward=5, loader=loader(workers=10), fetch=fetch(30, 3, in_workers=True), cpus=2
    )
    assert any("for storage or for one of 2 cores" in line for line in diagnose(recording(r)).why)
    assert any("mostly waiting;" in line for line in diagnose(recording(replace(r, cpus=16))).why)


def test_graph_breaks_come_before_torch_compile():
    """Based on a CRF that reads an index from each maximum; torch.compile made it slower."""
    loops = rank(forward=10, operators=1300, large_operators_ms=1.0, samples=0.0)
    reads = replace(loops, values_read=34)
    for r, title in (
        (loops, "torch.compile"),
        (reads, "operators on whole tensors instead of loops"),
    ):
        (found,) = [a for a in diagnose(recording(r)).advice if a.cause == "launch"]
        assert found.title == title
        assert ("reads 34 tensor values" in found.how) == (r is reads)


def test_epoch_longer_than_job_has_no_duration():
    """Based on a sampler of 1e10 samples in a training of 600 steps."""
    d = diagnose(recording(rank(forward=10, loader=loader(batches=156_250_000))))
    assert d.seconds_an_epoch(1) == pytest.approx(156_250)
    assert replace(d, job_steps=600.0).seconds_an_epoch(1) is None
    assert replace(d, job_steps=600.0).seconds_a_job(1) == pytest.approx(0.6)


def test_at_most_two_slow_script_lines_get_advice():
    seen = tuple(
        Line(part="other", line=f"/a/ppo.py:{at} act", called="", share=share)
        for at, share in ((1, 0.1), (2, 0.25), (3, 0.3), (4, 0.22))
    )
    d = diagnose(recording(rank(forward=10, other=90, lines=seen)))
    assert [a.title for a in d.advice] == ["less of ppo.py:3 act", "less of ppo.py:2 act"]


def cached(plain, without, **more):
    """Return the diagnosis of a rank whose steps are shorter with a cached batch."""
    blocks = [block("plain", **plain), block("cached_batch", **without)] * 3
    return diagnose(recording(rank(**plain, blocks=blocks, **more)))


def test_workers_slower_than_none_get_zero_workers_advice():
    """Based on batches of four images: 2.6 ms with two workers, 1.4 ms without."""
    cheap = fetch(0.1, 0.1, in_workers=True)
    few = {"samples": 4.0, "loader": loader(workers=2, batch_size=4), "fetch": cheap, "cpus": 2}
    d = cached({"data": 1.0, "forward": 1.5}, {"forward": 1.0}, **few)
    assert saving(d, "no loader workers instead of 2") == pytest.approx(2.5 - 1.4, abs=0.2)
    dear = few | {"fetch": fetch(0.6, 0.6, in_workers=True)}
    assert (
        saving(
            cached({"data": 1.0, "forward": 1.5}, {"forward": 1.0}, **dear),
            "no loader workers instead of 2",
        )
        == 0
    )
    untried = diagnose(recording(rank(forward=1, **few)))
    assert not any("no loader workers" in a.title for a in (*untried.advice, *untried.not_worth))


def test_in_memory_rows_get_batch_indexing_advice():
    """Based on ratings in three tensors, where shards are slower."""
    rows = {
        "samples": 1024.0,
        "loader": loader(batch_size=1024, one_by_one=True),
        "fetch": fetch(0.003, 0.003, collate=5.0),
    }
    d = cached({"data": 8.0, "forward": 1.0}, {"forward": 1.0}, **rows)
    assert saving(d, "fetch a whole batch") == pytest.approx(8)
    assert not any("offline" in a.title for a in (*d.advice, *d.not_worth))
    own = rows | {"loader": loader(batch_size=1024)}
    assert not any(
        "one indexing" in a.title
        for a in cached({"data": 8.0, "forward": 1.0}, {"forward": 1.0}, **own).advice
    )


def test_thread_contention_gets_no_worker_advice():
    blocks = [block("plain", data=16, forward=30), block("fewer_threads", data=16, forward=10)] * 3
    r = rank(
        data=16,
        forward=30,
        blocks=blocks,
        loader=loader(),
        fetch=fetch(),
        fewer_threads=1,
        threads=2,
    )
    d = diagnose(recording(r))
    assert not any("worker" in a.title for a in (*d.advice, *d.not_worth))
