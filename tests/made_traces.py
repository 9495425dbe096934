"""Small traces with chosen times, as torch.profiler writes them on a GPU and as Nsight Systems exports them."""

import gzip
import json
import sqlite3
from typing import NamedTuple

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
CLOCK_US = 1_775_078_550_000_000.0
"""A clock that counts from 1970, as Kineto's does."""
PID = 4242


class Work(NamedTuple):
    """A step in microseconds from its start: (name, start, end) of host and device work.

    A kernel also has its launch time. `length`: time from this step to the next.
    """

    length: float
    kernels: tuple[tuple[str, float, float, float], ...] = ()
    copies: tuple[tuple[str, float, float, float], ...] = ()
    operators: tuple[tuple[str, float, float], ...] = ()
    calls: tuple[tuple[str, float, float], ...] = ()
    ranges: tuple[tuple[str, float, float], ...] = ()


def events_of(work, steps=8, clock_us=CLOCK_US, step_name="ProfilerStep#{}"):
    """Return the events of consecutive steps with the same work."""
    events, number = [], 1
    for step in range(steps):
        zero = clock_us + step * work.length

        def event(category, name, start, end, correlation=None, zero=zero, **args):
            about = args | ({} if correlation is None else {"correlation": correlation})
            return {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": PID,
                "tid": PID,
                "ts": zero + start,
                "dur": end - start,
                "args": about,
            }

        if step_name:
            events.append(event("user_annotation", step_name.format(step), 0.0, work.length - 1.0))
        for category, several in (("kernel", work.kernels), ("gpu_memcpy", work.copies)):
            for name, launched, start, end in several:
                events.append(
                    event(
                        "cuda_runtime",
                        "cudaLaunchKernel",
                        launched,
                        launched + 3.0,
                        number,
                        cbid=211,
                    )
                )
                events.append(
                    event(category, name, start, end, number, device=0, stream=7, grid=[32, 1, 2])
                )
                events.append(
                    {
                        "ph": "s",
                        "id": number,
                        "pid": PID,
                        "tid": PID,
                        "ts": zero + launched,
                        "cat": "ac2g",
                        "name": "ac2g",
                    }
                )
                number += 1
        events += [event("cpu_op", *one) for one in work.operators]
        events += [event("cuda_runtime", *one, correlation=10**6 + number) for one in work.calls]
        events += [event("user_annotation", *one) for one in work.ranges]
    return events


def trace_of(events, rank=None, world_size=None, device="NVIDIA H100 80GB HBM3"):
    about = (
        {}
        if rank is None
        else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}}
    )
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": device}],
        **about,
        "traceEvents": events,
        "traceName": "t.json",
    }


def write(path, trace):
    data = json.dumps(trace, indent=1).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# Steps of 10 ms each with different device work, communication and reasons for idle time.
COMPUTING = Work(
    10_000.0,
    kernels=(
        (GEMM, 10.0, 100.0, 7100.0),
        (ADD, 20.0, 7100.0, 9100.0),
        (GEMM, 30.0, 9100.0, 10_100.0),
    ),
    operators=(("aten::mm", 5.0, 60.0),),
)
WAITING_FOR_DATA = Work(
    10_000.0,
    kernels=((GEMM, 6010.0, 6100.0, 9000.0), (ADD, 6020.0, 9000.0, 10_000.0)),
    operators=(("aten::mm", 6005.0, 6060.0),),
    ranges=((LOADER, 0.0, 6000.0),),
)
LAUNCHING = Work(
    10_000.0,
    kernels=tuple(
        (ADD, 500.0 * i + 400.0, 500.0 * i + 410.0, 500.0 * i + 510.0) for i in range(19)
    ),
    operators=tuple(("aten::add", 500.0 * i, 500.0 * i + 450.0) for i in range(19)),
)
EXCHANGING = Work(
    10_000.0,
    kernels=(
        (GEMM, 10.0, 100.0, 4100.0),
        (ALL_REDUCE, 20.0, 3100.0, 9100.0),
        (ADD, 30.0, 9100.0, 10_100.0),
    ),
    operators=(("aten::mm", 5.0, 60.0),),
)
SYNCHRONISING = Work(
    10_000.0,
    kernels=((GEMM, 100.0, 200.0, 3000.0), (ADD, 8900.0, 9000.0, 9990.0)),
    operators=(("aten::item", 150.0, 3020.0), ("aten::add", 3030.0, 9000.0)),
    calls=(("cudaStreamSynchronize", 160.0, 3010.0), ("cudaStreamSynchronize", 9010.0, 10_000.0)),
)
COPYING = Work(
    10_000.0,
    kernels=((GEMM, 10.0, 6100.0, 10_100.0),),
    copies=(("Memcpy HtoD (Pageable -> Device)", 5.0, 100.0, 6100.0),),
    operators=(("aten::copy_", 2.0, 30.0),),
)

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
    text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
"""
"""The columns that the User Guide of Nsight Systems documents, but for some that nothing here reads."""


def write_nsight(path, works, steps=8, nvtx="step {}"):
    """Write an export in which each of `works` is a process."""
    strings: dict[str, int] = {}

    def key(name):
        return strings.setdefault(name, len(strings) + 1)

    with sqlite3.connect(path) as base:
        base.executescript(SCHEMA)
        base.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 0, 'NVIDIA A100-SXM4-80GB', '')")
        for process, work in enumerate(works, 1000):
            owner, thread, correlation = process << 24, (process << 24) + process, 0
            for step in range(steps):
                zero = 1_000_000 + int(step * work.length * 1000)

                def at(us, zero=zero):
                    return zero + int(us * 1000)

                if nvtx:
                    base.execute(
                        "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, NULL, NULL, ?, ?, NULL, NULL, 0)",
                        (at(0), at(work.length - 1), nvtx.format(step), thread),
                    )
                for name, launched, start, end in work.kernels:
                    correlation += 1
                    base.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0, NULL)",
                        (
                            at(launched),
                            at(launched + 3),
                            thread,
                            correlation,
                            key("cudaLaunchKernel_v7000"),
                        ),
                    )
                    base.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, NULL, 7, ?, ?, ?, ?, NULL, 0, 1, 1, 1)",
                        (at(start), at(end), correlation, owner, key(name), key(name[:20])),
                    )
                for _, launched, start, end in work.copies:
                    correlation += 1
                    base.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0, NULL)",
                        (
                            at(launched),
                            at(launched + 3),
                            thread,
                            correlation,
                            key("cudaMemcpyAsync_v3020"),
                        ),
                    )
                    base.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 1, 7, ?, ?, 4096, 1)",
                        (at(start), at(end), correlation, owner),
                    )
                for name, start, end in work.calls:
                    base.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, NULL, ?, 0, NULL)",
                        (at(start), at(end), thread, key(f"{name}_v3020")),
                    )
        base.executemany(
            "INSERT INTO StringIds VALUES (?, ?)",
            [(number, name) for name, number in strings.items()],
        )
    base.close()
    return path
