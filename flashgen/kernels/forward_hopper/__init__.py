"""The forward kernel for Hopper, in Gluon: warp-specialised, persistent, fed by TMA."""
