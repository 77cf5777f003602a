/** Asks for the status of a job until it has finished, at increasing intervals. */
import type { JobStatus } from "./protocol";

const FIRST_DELAY = 30;
const LONGEST_DELAY = 300;
/** The ratio of consecutive delays: the end of a job is noticed after at most 20% more of its time. */
const DELAY_FACTOR = 1.2;

/** A reply about a job. */
export interface JobReply<J extends JobStatus> {
  result: J;
  buffers: DataView[];
}

export interface JobListener<J extends JobStatus> {
  onStatus(reported: JobReply<J>): void;
  /** There is no reply: the kernel is lost, or does not know the job. */
  onError(error: Error): void;
}

function asError(reason: unknown): Error {
  return reason instanceof Error ? reason : new Error(String(reason));
}

/** Polls one job at a time; late replies for an earlier job are ignored. */
export class Poller<J extends JobStatus> {
  private timer: ReturnType<typeof setTimeout> | undefined;
  private round = 0;

  constructor(
    private readonly ask: (id: number) => Promise<JobReply<J>>,
    private readonly listener: JobListener<J>,
  ) {}

  /** `start`: the reply to the request that starts or names the job. */
  follow(start: Promise<JobReply<J>>): void {
    this.stop();
    void this.receive(start, this.round, FIRST_DELAY);
  }

  stop(): void {
    clearTimeout(this.timer);
    this.round++;
  }

  private async receive(asked: Promise<JobReply<J>>, round: number, delay: number): Promise<void> {
    try {
      const answer = await asked;
      if (round !== this.round) return;
      const { id, state } = answer.result;
      if (state === "running") {
        const again = () => void this.receive(this.ask(id), round, Math.min(DELAY_FACTOR * delay, LONGEST_DELAY));
        this.timer = setTimeout(again, delay);
      }
      this.listener.onStatus(answer);
    } catch (reason) {
      if (round !== this.round) return;
      this.stop();
      this.listener.onError(asError(reason));
    }
  }
}
