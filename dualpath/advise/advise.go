package advise

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/penstock-kv/penstock/dualpath"
)

// Cluster describes the cluster.
type Cluster struct {
	// PrefillNodes and DecodeNodes are numbers of nodes. GPUs is the number of engines of one node.
	PrefillNodes, DecodeNodes, GPUs int
	// Storage is the bandwidth of a node's storage NIC, Compute that of a GPU's compute NIC, DRAM
	// that of a node's memory, in bytes per second.
	Storage, Compute, DRAM float64
	// PrefillOnly is set if only prefill nodes read from storage.
	PrefillOnly bool
}

// Model is a language model on one kind of GPU.
type Model struct {
	// KVBytes is the size of a token's KV over all layers, in bytes.
	KVBytes float64
	// FLOPS is the rate that a GPU achieves in prefill, in floating-point operations per second.
	FLOPS float64
	// Step and StepPerRequest give the time of a decode step: Step + b StepPerRequest for a batch
	// of b requests, in seconds.
	Step, StepPerRequest float64
	// DecodeHBM is the capacity of a decode engine for KV, in tokens.
	DecodeHBM float64
	// Quota is the largest attention time of an engine in one prefill step. Overhead is the part of
	// a step's time that is neither attention nor linear layers. Both are in seconds.
	Quota, Overhead float64
}

// Round is one request of an agent.
type Round struct {
	// Hit is the number of tokens read from storage, Append the number computed in prefill, Gen the
	// number generated.
	Hit, Append, Gen float64
	// Linear and Attention are the numbers of floating-point operations of the prefill, in its
	// linear layers and in its attention.
	Linear, Attention float64
}

// Use is the utilization of a resource over the job: 1 means that the resource is always busy.
type Use struct {
	Name string
	Used float64
}

// The names of the resources.
const (
	StorageNICs = "storage NICs"
	Prefill     = "prefill compute"
	Decode      = "decode steps"
)

// Prediction is the predicted outcome of the job.
type Prediction struct {
	// Seconds is the duration of the job, Rounds the number of rounds, Throughput the rounds per
	// second.
	Seconds, Throughput float64
	Rounds              int
	// Uses has the utilizations of the resources over the job, the highest first. The first
	// resource limits the job.
	Uses []Use
	// PrefillReads is the share of the cached tokens that prefill nodes read.
	PrefillReads float64
	// TTFT is the time to first token and TPOT the time per output token, as means over the rounds,
	// in seconds.
	TTFT, TPOT float64
	// Analysis is the bottleneck-free analysis: Safe is the range of prefill nodes per decode node
	// in which storage saturates before the network, First the resource that would saturate next.
	Analysis dualpath.Analysis
}

// Validate returns an error that names the first value out of its range.
func (m Model) Validate() error {
	for _, v := range []struct {
		name  string
		value float64
	}{{"KV bytes of a token", m.KVBytes}, {"FLOP/s of a GPU", m.FLOPS}, {"decode step", m.Step}, {"decode HBM", m.DecodeHBM}, {"attention quota", m.Quota}} {
		if !(v.value > 0) || math.IsInf(v.value, 0) {
			return fmt.Errorf("advise: %s is %v; it must be positive", v.name, v.value)
		}
	}
	if !(m.StepPerRequest >= 0 && m.Overhead >= 0) || math.IsInf(m.StepPerRequest+m.Overhead, 0) {
		return fmt.Errorf("advise: a request adds %v s to a decode step, a prefill step takes %v s besides; both must be 0 or more", m.StepPerRequest, m.Overhead)
	}
	return nil
}

// analyze returns the bottleneck-free analysis of the cluster, which also validates the cluster.
func (c Cluster) analyze() (dualpath.Analysis, error) {
	const gb = 1e9
	return dualpath.Analyze(dualpath.Cluster{
		PrefillNodes: c.PrefillNodes, DecodeNodes: c.DecodeNodes, GPUs: c.GPUs,
		CNIC: c.Compute / gb, SNICs: c.Storage / c.Compute, DRAM: c.DRAM / gb,
	})
}

// Predict predicts the job of the agents on the cluster. agents has the rounds of each agent, and
// all agents begin at the same time. Predict may take several thousand passes over all agents.
func Predict(c Cluster, m Model, agents [][]Round) (Prediction, error) {
	a, err := c.analyze()
	if err != nil {
		return Prediction{}, err
	}
	if err := m.Validate(); err != nil {
		return Prediction{}, err
	}
	p := Prediction{Analysis: a}
	f := newFluid(c, m, a.Saturation)
	for i, rounds := range agents {
		for j, r := range rounds {
			if !(r.Hit >= 0 && r.Append > 0 && r.Gen > 0 && r.Linear >= 0 && r.Attention >= 0) || math.IsInf(r.Hit+r.Append+r.Gen+r.Linear+r.Attention, 0) {
				return Prediction{}, fmt.Errorf("advise: round %d of agent %d is %+v; it must append and generate, and nothing is negative", j, i, r)
			}
		}
		if len(rounds) > 0 {
			p.Rounds += len(rounds)
			f.active = append(f.active, agent{rounds: rounds, demand: f.demand(&rounds[0])})
		}
	}
	if p.Rounds == 0 {
		return Prediction{}, errors.New("advise: no rounds: there is no agent that does anything")
	}
	for len(f.active) > 0 {
		f.settle()
		f.divide()
		f.advance()
	}
	p.Seconds = f.now
	p.Throughput = float64(p.Rounds) / p.Seconds
	p.TTFT, p.TPOT = f.ttft/float64(p.Rounds), f.tpot/float64(p.Rounds)
	if f.read > 0 {
		p.PrefillReads = f.readPrefill / f.read
	}
	for k, name := range [...]string{StorageNICs, Prefill, Decode} {
		p.Uses = append(p.Uses, Use{name, f.used[k] / p.Seconds})
	}
	slices.SortStableFunc(p.Uses, func(a, b Use) int { return cmp.Compare(b.Used, a.Used) })
	return p, nil
}

// fluid is the state of the simulated job.
type fluid struct {
	m Model
	// readers is the number of storage NICs that read. Without Cluster.PrefillOnly it is multiplied
	// by the share of their bandwidth that dualpath.Analyze allows. storage and compute are the
	// bandwidths of one storage NIC and one compute NIC, in bytes per second. gpus and decoders are
	// the numbers of prefill and decode engines.
	readers, storage, compute, gpus, decoders float64

	active []agent
	now    float64
	// stretch is the ratio of a request's time at storage, with waiting, to its service time.
	// prefill is the time of a request in prefill and step the time of a token in decode, in
	// seconds.
	stretch, prefill, step float64
	// prefillMax is the maximum rate of prefill in requests per second, decodeMax that of decode in
	// tokens per second.
	prefillMax, decodeMax float64
	// largest has the attention times of a sample of the current rounds, ascending.
	largest []float64

	// nodes has the numbers of prefill and of decode nodes that read from storage. share is the
	// current share of a request's cached tokens that the prefill node reads. read is the number of
	// tokens read so far, readPrefill the number of these that prefill nodes have read.
	nodes             [2]float64
	share             float64
	read, readPrefill float64

	ttft, tpot float64
	used       [3]float64
}

// agent is one agent of the job, in its current round.
type agent struct {
	rounds []Round
	// done is the completed share of the current round, rounds[0].
	done   float64
	demand demand
}

// demand is the work of a round at each station: in seconds, and for decode (gen) in tokens.
type demand struct {
	// storage is the time of the round's read from storage if all storage NICs share it. before is
	// the additional time if one NIC reads alone. delay is before plus the times at stations
	// without a queue.
	storage, before, delay float64
	// attention is the attention time on one engine, linear the time of the linear layers on all
	// prefill engines together.
	attention, linear float64
	gen               float64
}

func newFluid(c Cluster, m Model, saturation float64) *fluid {
	readers, nodes := float64(c.PrefillNodes), [2]float64{float64(c.PrefillNodes), 0}
	if !c.PrefillOnly {
		readers, nodes[1] = float64(c.PrefillNodes+c.DecodeNodes)*saturation, float64(c.DecodeNodes)
	}
	return &fluid{
		m: m, readers: readers, nodes: nodes, storage: c.Storage, compute: c.Compute,
		gpus: float64(c.PrefillNodes * c.GPUs), decoders: float64(c.DecodeNodes * c.GPUs),
		stretch: 1, prefill: m.Overhead, step: m.Step + m.StepPerRequest,
	}
}

// demand returns the demand of a round.
func (f *fluid) demand(r *Round) demand {
	m := &f.m
	read := r.Hit * m.KVBytes / f.storage
	d := demand{storage: read / f.readers, attention: r.Attention / m.FLOPS, linear: r.Linear / m.FLOPS / f.gpus, gen: r.Gen}
	d.before = max(read-d.storage, 0)
	d.delay = d.before + (r.Hit+r.Append)*m.KVBytes/f.compute + m.Step/2
	return d
}

// cycle returns the current duration of a round.
func (f *fluid) cycle(d *demand) float64 {
	return d.storage*f.stretch + f.prefill + d.delay + d.gen*f.step
}

// settle computes the times of a request at each station, for the current rounds of the agents. It
// iterates to a fixed point, starting from the previous result.
func (f *fluid) settle() {
	n := float64(len(f.active))
	f.sample()
	batchMax := f.batchMax()
	f.decodeMax = f.decoders * batchMax / (f.m.Step + f.m.StepPerRequest*batchMax)
	for range 100 {
		var x, queue, attention, linear, decoding float64
		for i := range f.active {
			d := &f.active[i].demand
			pace := 1 / f.cycle(d)
			x += pace
			queue += d.storage * f.stretch * pace
			attention += d.attention * pace
			linear += d.linear * pace
			decoding += d.gen * f.step * pace
		}
		batch := max(decoding/f.decoders, 1)
		fits := min(batch, batchMax)
		change := approach(&f.step, (f.m.Step+f.m.StepPerRequest*fits)*batch/fits)
		change = max(change, approach(&f.stretch, 1+queue*(n-1)/n))
		change = max(change, approach(&f.prefill, f.steps(x, attention/x, linear/x)))
		if change < 1e-3 {
			return
		}
	}
}

// divide computes the share of a request's cached tokens that the prefill node reads. Both nodes of
// a request end their reads at the same time. So the share is one half, minus half the difference
// between the work queued at the two nodes' NICs (M/G/1 queues with processor sharing). In an idle
// cluster the share is one half; in a busy cluster all NICs are equally loaded.
func (f *fluid) divide() {
	if f.nodes[1] == 0 {
		f.share = 1
		return
	}
	busy := 0.0
	for i := range f.active {
		d := &f.active[i].demand
		busy += d.storage / f.cycle(d)
	}
	busy *= f.nodes[0] + f.nodes[1]
	ahead := func(share, nodes float64) float64 {
		u := min(busy*share/nodes, 0.999)
		return share * u / (1 - u)
	}
	// The right-hand side falls as the share grows, so exactly one share satisfies the equation.
	low, high := 0.0, 1.0
	for range 40 {
		mid := (low + high) / 2
		if 0.5+(ahead(1-mid, f.nodes[1])-ahead(mid, f.nodes[0]))/2 > mid {
			low = mid
		} else {
			high = mid
		}
	}
	f.share = low
}

// approach moves a value half of the way to next. It returns the distance before the move, relative
// to next.
func approach(v *float64, next float64) float64 {
	change := math.Abs(next-*v) / max(next, 1e-12)
	*v = (*v + next) / 2
	return change
}

// batchMax returns the number of requests for which a decode engine's memory has room.
func (f *fluid) batchMax() float64 {
	tokens := 0.0
	for i := range f.active {
		r := &f.active[i].rounds[0]
		tokens += r.Hit + r.Append + r.Gen
	}
	return max(f.m.DecodeHBM*float64(len(f.active))/tokens, 1)
}

// steps returns the time of a request in the prefill group. x is the rate of requests per second;
// attention and linear are the mean values of demand.attention and demand.linear. A step processes
// the requests that arrived during the step before, and ends when its busiest engine ends. The
// attention time of that engine is the mean of all engines, or the time of the largest request if
// that is longer, up to the quota. A request waits for half a step if a step is running, and then
// takes one step. If more requests arrive than fit into a step, the result grows until the agents
// send more slowly.
func (f *fluid) steps(x, attention, linear float64) float64 {
	fits := f.gpus * f.m.Quota / max(attention, 1e-12)
	f.prefillMax = fits / (f.m.Overhead + f.m.Quota + fits*linear)
	if x >= f.prefillMax {
		return f.prefill * x / f.prefillMax
	}
	step, k := f.m.Overhead, 1.0
	for range 50 {
		k = max(min(x*step, fits), 1)
		busiest := min(max(k*attention/f.gpus, f.largestOf(k)), f.m.Quota)
		if approach(&step, f.m.Overhead+busiest+k*linear) < 1e-4 {
			break
		}
	}
	return step * (1 + min(x*step/k, 1)/2)
}

// sampleMax is the maximum number of attention times that sample sorts.
const sampleMax = 1024

// sample records the attention times of at most sampleMax of the current rounds.
func (f *fluid) sample() {
	f.largest = f.largest[:0]
	for i := 0; i < len(f.active); i += 1 + len(f.active)/sampleMax {
		f.largest = append(f.largest, f.active[i].demand.attention)
	}
	slices.Sort(f.largest)
}

// largestOf returns an estimate of the largest attention time among k rounds.
func (f *fluid) largestOf(k float64) float64 {
	at := int(k / (k + 1) * float64(len(f.largest)))
	return f.largest[min(at, len(f.largest)-1)]
}

// advance advances all agents by the mean duration of their current rounds.
func (f *fluid) advance() {
	mean, longest := 0.0, 0.0
	for i := range f.active {
		mean += f.cycle(&f.active[i].demand) / float64(len(f.active))
	}
	left := f.active[:0]
	for _, a := range f.active {
		took, ended := f.move(&a, mean)
		longest = max(longest, took)
		if !ended {
			left = append(left, a)
		}
	}
	clear(f.active[len(left):])
	f.active = left
	f.now += longest
}

// move advances one agent by the time within, or to the end of its last round if that comes sooner.
// It returns the time used and whether the agent has ended.
func (f *fluid) move(a *agent, within float64) (took float64, ended bool) {
	for took < within {
		d := &a.demand
		whole := f.cycle(d)
		part := min((within-took)/whole, 1-a.done)
		hit := a.rounds[0].Hit * part
		f.read, f.readPrefill = f.read+hit, f.readPrefill+hit*f.share
		f.used[0] += d.storage * part
		f.used[1] += part / f.prefillMax
		f.used[2] += d.gen * part / f.decodeMax
		took += part * whole
		if a.done += part; a.done < 1-1e-12 {
			return took, false
		}
		f.ttft += d.storage*f.stretch + d.before + f.prefill
		f.tpot += f.step
		if a.rounds, a.done = a.rounds[1:], 0; len(a.rounds) == 0 {
			return took, true
		}
		a.demand = f.demand(&a.rounds[0])
	}
	return took, false
}

// Division is one way to divide the nodes into prefill and decode nodes, with the predicted
// outcome.
type Division struct {
	PrefillNodes, DecodeNodes int
	Prediction                Prediction
	// Safe is set if storage saturates before the compute NICs and the memory.
	Safe bool
}

// Divide predicts the job for every division of the cluster's nodes into prefill and decode nodes.
// The division with the fewest prefill nodes comes first.
func Divide(c Cluster, m Model, agents [][]Round) ([]Division, error) {
	nodes := c.PrefillNodes + c.DecodeNodes
	var out []Division
	for p := 1; p < nodes; p++ {
		c.PrefillNodes, c.DecodeNodes = p, nodes-p
		pred, err := Predict(c, m, agents)
		if err != nil {
			return nil, err
		}
		out = append(out, Division{p, nodes - p, pred, pred.Analysis.Safe.Holds(float64(p) / float64(nodes-p))})
	}
	return out, nil
}

// Best returns the index of the division with the shortest job. If several are equal, it returns
// the first.
func Best(d []Division) int {
	best := 0
	for i := range d {
		if d[i].Prediction.Seconds < d[best].Prediction.Seconds {
			best = i
		}
	}
	return best
}
