package peer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-kv/penstock/internal/sys"
	"github.com/penstock-kv/penstock/lab/bench"
)

// FioJob is one job of fio with io_uring and O_DIRECT.
type FioJob struct {
	// RW is fio's rw parameter: randread, read, randwrite, write.
	RW         string
	File       string
	BlockBytes int64
	Depth      int
	// OffsetBytes and SizeBytes are the beginning and the length of the part of the file that is
	// used.
	OffsetBytes, SizeBytes int64
	// Memory is the source of fio's buffers (fio's mem parameter): "mmaphuge" for reserved
	// huge pages, which HugePages provides.
	Memory string
	Time   time.Duration
}

// Run runs the job and returns its rate in MiB/s and its processor time.
func (j FioJob) Run(ctx context.Context) (bench.Sample, error) {
	args := []string{
		"--name=bench", "--thread", "--ioengine=io_uring", "--direct=1", "--rw=" + j.RW,
		"--filename=" + j.File,
		fmt.Sprint("--bs=", j.BlockBytes), fmt.Sprint("--iodepth=", j.Depth),
		fmt.Sprint("--offset=", j.OffsetBytes), fmt.Sprint("--size=", j.SizeBytes),
		"--time_based", fmt.Sprintf("--runtime=%dms", j.Time.Milliseconds()),
		"--randrepeat=0", "--norandommap", "--allow_file_create=0",
		"--iomem=" + j.Memory, "--output-format=json",
	}
	if strings.HasSuffix(j.RW, "read") {
		args = append(args, "--readonly")
	}
	cmd := exec.CommandContext(ctx, "fio", args...)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
		}
		return nil, fmt.Errorf("fio: %w", err)
	}
	return parseFio(out)
}

// parseFio reads rates and processor time from fio's JSON. usr_cpu and sys_cpu are percentages of
// the job's runtime, so the processor time to prepare memory and files is not included.
func parseFio(out []byte) (bench.Sample, error) {
	// fio prints notes before the object.
	if i := strings.IndexByte(string(out), '{'); i > 0 {
		out = out[i:]
	}
	type side struct {
		Bytes   int64 `json:"io_bytes"`
		Runtime int64 `json:"runtime"` // ms
	}
	var r struct {
		Jobs []struct {
			Error      int     `json:"error"`
			RawRead    side    `json:"read"`
			RawWrite   side    `json:"write"`
			UserCPU    float64 `json:"usr_cpu"`
			SystemCPU  float64 `json:"sys_cpu"`
			JobRuntime int64   `json:"job_runtime"` // ms
		} `json:"jobs"`
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return nil, fmt.Errorf("fio: parse the output (expected the format of version 3.x): %w", err)
	}
	if len(r.Jobs) != 1 || r.Jobs[0].Error != 0 {
		return nil, fmt.Errorf("fio: %d jobs, or an error: %.200s", len(r.Jobs), out)
	}
	j := r.Jobs[0]
	s := j.RawRead
	if s.Bytes == 0 {
		s = j.RawWrite
	}
	if s.Bytes == 0 || s.Runtime == 0 {
		return nil, errors.New("fio: no bytes were moved")
	}
	gib := float64(s.Bytes) / (1 << 30)
	return bench.Sample{
		bench.Rate: float64(s.Bytes) / (1 << 20) / (float64(s.Runtime) / 1e3),
		bench.CPU:  (j.UserCPU + j.SystemCPU) / 100 * float64(j.JobRuntime) / gib,
	}, nil
}

const hugePagesFile = "/proc/sys/vm/nr_hugepages"

// HugePages makes sure that n reserved huge pages are free, for fio's buffers. It returns the value
// of fio's mem parameter, a note for the report, and a function that restores the old setting. If
// the reservation is not permitted, fio gets ordinary pages, and the note warns that the comparison
// is not fair.
func HugePages(n int64) (memory, note string, restore func() error) {
	nothing := func() error { return nil }
	pool, err := sys.ReadHugePages()
	if err == nil && pool.Free >= n {
		return "mmaphuge", "fio's buffers are reserved huge pages", nothing
	}
	want := pool.Total + n - pool.Free
	if err == nil {
		err = os.WriteFile(hugePagesFile, []byte(strconv.FormatInt(want, 10)), 0o644)
	}
	if err == nil {
		if now, e := sys.ReadHugePages(); e != nil || now.Free < n {
			err = fmt.Errorf("asked for %d pages and got %d", want, now.Total)
		}
	}
	restore = func() error {
		return os.WriteFile(hugePagesFile, []byte(strconv.FormatInt(pool.Total, 10)), 0o644)
	}
	if err != nil {
		return "mmap", fmt.Sprintf("fio has 4 KiB pages, which halves its bandwidth: ratios to fio are too good here (%s: %v)", hugePagesFile, err), restore
	}
	return "mmaphuge", "fio's buffers are reserved huge pages (vm.nr_hugepages was set for this run)", restore
}
