package worker

import "time"

// counters are what a worker counts about itself.
type counters struct {
	passes, partitions uint64
	bytes              int64
	partitionsInPlan   int
	waits              uint64
	waited             time.Duration
}

// Stats is a snapshot of what a rank has done. The unit is in the key.
type Stats struct {
	Rank             int      `json:"rank"`
	World            int      `json:"world_size"`
	Iterations       uint64   `json:"steps"`
	Passes           uint64   `json:"backward_passes"`
	Partitions       uint64   `json:"partitions"`
	PartitionsInPlan int      `json:"partitions_per_step"`
	Bytes            int64    `json:"reduced_bytes"`
	HeldBytes        int64    `json:"held_bytes"`
	InFlight         int      `json:"in_flight"`
	Waits            uint64   `json:"gate_waits"`
	WaitedS          float64  `json:"gate_wait_s"`
	Settings         Settings `json:"settings"`
	PeersAlive       int      `json:"peers_alive"`
}

// Stats returns the counters as they stand.
func (w *Worker) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := Stats{
		Rank: w.opt.Rank, World: w.opt.World,
		Iterations: w.iteration, Passes: w.stats.passes,
		Partitions: w.stats.partitions, PartitionsInPlan: w.stats.partitionsInPlan, Bytes: w.stats.bytes,
		Waits: w.stats.waits, WaitedS: w.stats.waited.Seconds(),
		Settings:   w.settings,
		PeersAlive: w.opt.World - 1 - len(w.lost),
	}
	if w.sched != nil {
		s.HeldBytes = w.sched.HeldBytes()
		s.InFlight = w.sched.InFlight()
	}
	return s
}
