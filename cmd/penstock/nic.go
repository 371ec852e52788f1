package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-kv/penstock/rdma/qos"
	"github.com/penstock-kv/penstock/rdma/topo"
	"github.com/penstock-kv/penstock/rdma/topo/gpus"
	"github.com/penstock-kv/penstock/rdma/topo/probe"
)

func newNICCommand() *cobra.Command {
	return noun(&cobra.Command{
		Use:   "nic",
		Short: "Show and check the NICs and GPUs of this host",
	}, newNICListCommand(), newNICCheckCommand())
}

func newNICListCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "Show NICs and GPUs with roles, reasons, rates, NUMA nodes and pairs",
		Long: `Show the NICs and GPUs of this host: the role of each NIC with the reason, its state and
rate, the address at which peers reach it, and the NICs of each GPU with the path between
them. No device is opened.

Roles: a cnic is a GPU's own NIC, on the compute network; an snic reaches storage; a
shared NIC does both; a NIC with the role none is not used. A GPU's NICs are the closest
ones: under the same PCIe switch, else root complex, else NUMA node.`,
		Args: args(cobra.NoArgs),
	}
	f := addHostFlags(cmd)
	save := cmd.Flags().String("save", "", "copy the relevant part of /sys to this directory, for --sysfs or a bug report")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		h, err := f.read(cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		if *save != "" {
			if err := topo.Save(*save, f.tree()); err != nil {
				return fmt.Errorf("--save: %w", err)
			}
		}
		return outputOf(cmd).emit(h, func(t *table) { fmt.Fprint(t, h) })
	}
	return cmd
}

// hostFlags are the flags that select the host to examine.
type hostFlags struct {
	sysfs string
	roles []string
}

func addHostFlags(cmd *cobra.Command) *hostFlags {
	f := &hostFlags{}
	cmd.Flags().StringVar(&f.sysfs, "sysfs", "", "a copy of another host's /sys, as made by nic list --save; other properties are then not checked")
	cmd.Flags().StringArrayVar(&f.roles, "role", nil, "NIC=ROLE: the NIC is a cnic, an snic, shared or none, whatever the rules say; may be repeated")
	return f
}

// tree returns the file tree of --sysfs. Nil means the sysfs of this host.
func (f *hostFlags) tree() fs.FS {
	if f.sysfs == "" {
		return nil
	}
	return os.DirFS(f.sysfs)
}

func (f *hostFlags) read(warn io.Writer) (topo.Host, error) {
	o := topo.Options{Roles: make(map[string]topo.Role)}
	for _, text := range f.roles {
		nic, name, ok := strings.Cut(text, "=")
		if !ok {
			return topo.Host{}, usagef("--role %s: write NIC=ROLE", text)
		}
		role, err := topo.ParseRole(name)
		if err != nil {
			return topo.Host{}, usagef("--role %s: %w", text, err)
		}
		o.Roles[nic] = role
	}
	if f.sysfs != "" {
		info, err := os.Stat(f.sysfs)
		if err == nil && !info.IsDir() {
			err = errors.New("not a directory")
		}
		if err != nil {
			return topo.Host{}, fmt.Errorf("--sysfs %s: %w", f.sysfs, err)
		}
		o.Sysfs = f.tree()
		return topo.Read(o), nil
	}
	o.Addrs = probe.Addrs
	known, gpuErr := gpus.List()
	o.GPUs = known
	h := topo.Read(o)
	if gpuErr != nil && len(h.GPUs) > 0 {
		fmt.Fprintf(warn, "penstock: GPUs without their names: %v\n", gpuErr)
	}
	return h, nil
}

func newNICCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Report faults of NICs, their links and the fabric's QoS, with the remedies",
		Long: `Check for the causes of slow or failing transfers: ports that are down, rates and PCIe
links below their maximum, missing RoCE v2 GIDs, small MTUs, GPUs far from their
NIC, bonds that use one member, growing counts of PFC pause frames, a low limit of locked
memory, missing kernel modules. Each finding is one line with the remedy. The exit
code is 1 if transfers fail because of a finding. A finding that only slows transfers is
a warning.

With --qos the lanes that the fabric gives to collectives and to cache traffic are
compared with penstock's marks (deploy/qos); a deviation there is a failure.`,
		Args: args(cobra.NoArgs),
	}
	c := &nicCheck{host: addHostFlags(cmd)}
	cmd.Flags().DurationVar(&c.interval, "interval", time.Second, "time for which the counters of pause frames are observed; 0: not at all")
	cmd.Flags().Float64Var(&c.rate, "rate", 0, "required rate of every RDMA NIC, in Gb/s; 0: the rate of others of its model and role")
	cmd.Flags().StringVar(&c.qos, "qos", "", "an OpenSM file, or what `dcb` prints, to compare with the marks; - is standard input")
	cmd.Flags().StringVar(&c.marks, "qos-map", "", "marks of the traffic classes, if not the default: "+qos.Default().String())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return c.run(cmd) }
	return cmd
}

// nicCheck is one run of nic check.
type nicCheck struct {
	host     *hostFlags
	interval time.Duration
	rate     float64
	qos      string
	marks    string
}

// nicReport is the output of nic check.
type nicReport struct {
	Healthy  bool           `json:"healthy"`
	NICs     int            `json:"nics"`
	Usable   int            `json:"usable"`
	Findings []topo.Finding `json:"findings"`
	// QoS is the result of the check of the configuration --qos; nil without --qos.
	QoS *qos.Report `json:"qos,omitempty"`
}

func (c *nicCheck) run(cmd *cobra.Command) error {
	marks, err := qos.Parse(c.marks)
	if err != nil {
		return usagef("--qos-map: %w", err)
	}
	h, err := c.host.read(cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	facts := topo.Facts{}
	if c.host.sysfs == "" {
		if facts, err = probe.Facts(cmd.Context(), h, c.interval); err != nil {
			return err
		}
	}
	facts.RateGbps = c.rate
	r := nicReport{NICs: len(h.NICs), Findings: topo.Check(h, facts)}
	for _, n := range h.NICs {
		if n.Usable {
			r.Usable++
		}
	}
	if c.host.sysfs == "" {
		r.Findings = append(r.Findings, portQoS(cmd.Context(), h, marks)...)
	}
	if err := c.checkQoS(cmd, marks, &r); err != nil {
		return err
	}
	r.Healthy = !topo.Failed(r.Findings) && (r.QoS == nil || len(r.QoS.Deviations) == 0)
	if err := outputOf(cmd).emit(r, func(t *table) { printNICReport(t, r) }); err != nil {
		return err
	}
	if !r.Healthy {
		return errReported
	}
	return nil
}

// checkQoS checks the configuration of --qos.
func (c *nicCheck) checkQoS(cmd *cobra.Command, marks qos.Map, r *nicReport) error {
	if c.qos == "" {
		return nil
	}
	var text []byte
	var err error
	if c.qos == "-" {
		text, err = io.ReadAll(io.LimitReader(cmd.InOrStdin(), qosFileMax))
	} else {
		text, err = os.ReadFile(c.qos)
	}
	if err != nil {
		return fmt.Errorf("--qos: %w", err)
	}
	report, err := qos.Check(string(text), marks)
	if err != nil {
		return fmt.Errorf("--qos %s: %w", c.qos, err)
	}
	r.QoS = &report
	return nil
}

// qosFileMax bounds the input from standard input, in bytes.
const qosFileMax = 1 << 20

// portQoS returns findings about the packet classification of this host's RoCE ports, which it
// reads with the program dcb. A port that cannot be read has no finding.
func portQoS(ctx context.Context, h topo.Host, marks qos.Map) []topo.Finding {
	var out []topo.Finding
	for _, n := range h.NICs {
		if n.Kind != topo.RoCE || n.Software || !n.Usable || n.Role == topo.Unused || n.Netdev == "" {
			continue
		}
		text, err := dcbShow(ctx, n.Netdev)
		if err != nil {
			continue
		}
		d, err := qos.ParseDCB(text)
		if err != nil {
			continue
		}
		for _, dev := range d.Check(marks).Deviations {
			out = append(out, topo.Finding{
				Severity: topo.Warning, NIC: n.Name, Code: "qos", What: dev.What,
				Do: strings.ReplaceAll(dev.Do, "dev DEV", "dev "+n.Netdev) + "; deploy/qos/roce.sh does all",
			})
		}
	}
	return out
}

// dcbTimeout is the time limit of one run of dcb, which queries the kernel.
const dcbTimeout = 5 * time.Second

func dcbShow(ctx context.Context, netdev string) (string, error) {
	var all bytes.Buffer
	for _, part := range []string{"ets", "pfc", "app"} {
		ctx, cancel := context.WithTimeout(ctx, dcbTimeout)
		out, err := exec.CommandContext(ctx, "dcb", "-N", part, "show", "dev", netdev).Output()
		cancel()
		if err != nil {
			return "", fmt.Errorf("dcb %s show dev %s: %w", part, netdev, err)
		}
		all.Write(out)
		all.WriteByte('\n')
	}
	return all.String(), nil
}

func printNICReport(t *table, r nicReport) {
	fmt.Fprint(t, topo.Report(r.Findings))
	if q := r.QoS; q != nil {
		fmt.Fprintf(t, "\n%s: collectives are guaranteed %.1f %% beside cache traffic\n", q.Fabric, 100*q.HighShare)
		for _, d := range q.Deviations {
			where := d.Where
			if where != "" {
				where += ": "
			}
			fmt.Fprintf(t, "%s  qos  %s%s\n            → %s\n", topo.Failure, where, d.What, d.Do)
		}
	}
	fmt.Fprintf(t, "\n%d of %d NICs can be used\n", r.Usable, r.NICs)
}

// withNICs adds the NICs of this host to an error about an address that the host does not have.
func withNICs(err error) error {
	if !errors.Is(err, syscall.EADDRNOTAVAIL) {
		return err
	}
	return fmt.Errorf("%w: no NIC of this host has that address. It has:\n%v", err, topo.Read(topo.Options{Addrs: probe.Addrs}))
}
