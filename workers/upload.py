"""From the host to the device, without waiting for it."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on a device; the caller gives the array away."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # The pinned copy goes back to torch's pool, which hands it out again only after the stream has read it.
    return tensor.pin_memory().to(device, non_blocking=True)
