"""The package from outside: a real JupyterLab on this machine, a real Chromium, and what people do in them."""
