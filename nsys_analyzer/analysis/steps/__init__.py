"""Steps as the device lived them: what fills each one, why the GPU idles, and how long it would take otherwise."""
