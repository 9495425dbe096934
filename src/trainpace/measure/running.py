"""What is said of how a device ran during a measurement. Pure."""

from trainpace.core.outcome import DeviceRun

FULL_CLOCK = 0.9
"""Of the highest clock. Under load cards stay a few steps of 15 MHz below it; from here on something holds them."""
STEADY_CLOCK = 0.03
"""The spread of the clock during the steps, relative, from which on the steps are not alike."""
BUSY = 0.9


def clock_in_words(run: DeviceRun) -> str:
    """One sentence on clocks that were held down, locked or drifting; "" where there is nothing to say."""
    if run.sm_mhz is None:
        return ""
    low, high = run.sm_mhz_low or run.sm_mhz, run.sm_mhz_high or run.sm_mhz
    moved = high - low > STEADY_CLOCK * run.sm_mhz
    of_most = f" of {run.sm_mhz_max:,.0f}" if run.sm_mhz_max is not None else ""
    between = f", moving between {low:,.0f} and {high:,.0f}" if moved else ""
    if run.held_by:
        return (
            f"The clock was held down by {' and '.join(run.held_by)}: {run.sm_mhz:,.0f}"
            f" MHz{of_most}{between}."
        )
    if run.sm_mhz_max is not None and run.sm_mhz < FULL_CLOCK * run.sm_mhz_max:
        return (
            f"The clock ran at {run.sm_mhz:,.0f} MHz{of_most}{between}, and the driver gives no"
            " reason: it may be locked (nvidia-smi --reset-gpu-clocks)."
        )
    if moved:
        return (
            f"The clock moved between {low:,.0f} and {high:,.0f} MHz during the steps, so that they"
            " are not all alike."
        )
    return ""


def run_in_words(run: DeviceRun) -> list[str]:
    """Whatever is worth a sentence, the most disturbing first."""
    said = [clock_in_words(run)]
    if run.settled is False:
        said.append(
            "The steps' time had not settled when the warm-up ended: --seconds 10s gives it longer."
        )
    if run.busy_share is not None and run.busy_share < BUSY:
        launch = (
            "" if run.launch_ms is None else f", which needs {run.launch_ms:.3g} ms to launch it"
        )
        said.append(
            f"The device works in {100 * run.busy_share:.0f} % of the step and waits in the rest"
            f" for the host{launch}."
        )
    if run.power_w is not None:
        energy = "" if run.energy_j is None else f", {run.energy_j:.3g} J a step"
        said.append(f"The card drew {run.power_w:.0f} W{energy}.")
    return [sentence for sentence in said if sentence]
