"""What the package knows of other libraries; each part is imported when its library is there, or asked for."""
