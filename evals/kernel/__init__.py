"""The GPU kernels against their floors."""
