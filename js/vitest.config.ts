import { playwright } from "@vitest/browser-playwright";
import { defineConfig } from "vitest/config";

// Debian's Chromium; another one by CHROMIUM=/path/to/it.
const environment: Record<string, string | undefined> =
  (globalThis as { process?: { env: Record<string, string | undefined> } }).process?.env ?? {};

const flags = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
  "--disable-dev-shm-usage",
];

export default defineConfig({
  root: import.meta.dirname,
  test: {
    projects: [
      {
        extends: true,
        test: {
          name: "happy-dom",
          environment: "happy-dom",
          include: ["tests/*/*.test.ts"],
          exclude: ["tests/browser/**"],
        },
      },
      {
        extends: true,
        test: {
          name: "chromium",
          include: ["tests/browser/*.test.ts"],
          browser: {
            enabled: true,
            headless: true,
            screenshotFailures: false,
            provider: playwright({
              launchOptions: { executablePath: environment.CHROMIUM ?? "/usr/bin/chromium", args: flags },
            }),
            instances: [{ browser: "chromium" }],
          },
        },
      },
    ],
  },
});
