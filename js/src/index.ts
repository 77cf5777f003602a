import { FLAG } from "./protocol";

export default {
  render({ el }: { el: HTMLElement }) {
    el.className = "gp-root";
    el.dataset.flags = String(FLAG.plumbing);
  },
};
