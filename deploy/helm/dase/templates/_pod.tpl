{{/* What the pods of all roles have in common. */}}

{{- define "dase.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "dase.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Of dict "root" "component": whether such pods are given the settings. */}}
{{- define "dase.hasSettings" -}}
{{- if and .root.Values.run.config (has .component (list "learner" "actor" "evaluator")) -}}
yes
{{- end -}}
{{- end -}}

{{/* Of dict "root" "component" "values": labels and annotations of a pod; a change of settings that it is given
     changes them. */}}
{{- define "dase.podMetadata" -}}
labels:
  {{- include "dase.labels" . | nindent 2 }}
  {{- if .agent }}
  dase/agent: {{ .agent | quote }}
  {{- end }}
annotations:
  kubectl.kubernetes.io/default-container: {{ .component }}
  {{- if include "dase.hasSettings" . }}
  checksum/config: {{ .root.Values.run.config | sha256sum | trunc 16 }}
  {{- end }}
  {{- with .root.Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Of dict "root" "component" "values": the fields of a pod's spec beside its containers and volumes. */}}
{{- define "dase.podSpec" -}}
serviceAccountName: {{ include "dase.fullname" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- /* Whoever has joined takes its leave of each shard, which may take 4 s where one does not answer. */}}
terminationGracePeriodSeconds: {{ add .values.terminationGracePeriodSeconds (mul 4 (sub (int .root.Values.replay.shards) 1)) }}
securityContext:
  {{- include "dase.podSecurity" . | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with (.values.gpu | default dict).runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- with .values.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "dase.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Of dict "root" "component" "values" and perhaps "image": the fields of a container beside args and mounts. */}}
{{- define "dase.container" -}}
name: {{ .component }}
image: {{ include "dase.image" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "dase.containerSecurity" . | nindent 2 }}
resources:
  {{- include "dase.resources" . | nindent 2 }}
{{- end -}}

{{- define "dase.resources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- $gpu := .values.gpu | default dict -}}
{{- if gt (int $gpu.count) 0 -}}
{{- $limits := merge (dict $gpu.resource (int $gpu.count)) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Probes ask the plain HTTP beside the metrics, for gRPC's health lies behind TLS. A node answers whether its
     event loop turns within 3 s, and nothing about other pods decides whether it lives. Readiness of whoever
     needs a replay is that it has joined. A replay waits for its disk at each join and leave, and answers nobody
     meanwhile: where the disk is busy, that may take minutes. */}}
{{- define "dase.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 120
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: {{ ternary 40 8 (eq .component "replay") }}
{{- end -}}

{{- define "dase.extraEnv" -}}
{{- range $name, $value := .root.Values.extraEnv }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/* Metrics are plain HTTP, which --insecure allows; it does not weaken the port that has --tls. */}}
{{- define "dase.sharedArgs" -}}
- --run-id={{ include "dase.runId" .root }}
- --metrics-host=0.0.0.0
- --metrics-port=9500
- --insecure
{{- if .root.Values.tls.enabled }}
- --tls=/etc/dase/tls
{{- end }}
{{- end -}}

{{/* What whoever needs a replay is told, settings included. */}}
{{- define "dase.clientArgs" -}}
{{ include "dase.sharedArgs" . }}
- --replay={{ include "dase.replayAddresses" .root }}
- --replay-timeout={{ .values.replayTimeoutSeconds }}
- --agents={{ .root.Values.learners.count }}
{{- if not .root.Values.learners.explore }}
- --explore=false
{{- end }}
{{- /* On a volume that they share either learners or the evaluator write an agent's evaluations. */}}
{{- if and .root.Values.evaluator.enabled (not .root.Values.results.perLearner) }}
- --set=eval.by=evaluator
{{- end }}
{{- with .root.Values.run.preset }}
- --preset={{ . }}
{{- end }}
{{- if .root.Values.run.config }}
- --config=/etc/dase/run/run.toml
{{- end }}
{{- end -}}

{{- define "dase.commonMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if include "dase.hasSettings" . }}
- {name: run, mountPath: /etc/dase/run, readOnly: true}
{{- end }}
{{- end -}}

{{- define "dase.commonVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if include "dase.hasSettings" . }}
- name: run
  configMap: {name: {{ include "dase.fullname" .root }}-run}
{{- end }}
{{- end -}}

{{/* Of dict "root" "secret": one node's certificate, which is read again when it is renewed. */}}
{{- define "dase.tlsVolume" -}}
- name: tls
  secret: {secretName: {{ .secret | quote }}, defaultMode: 0440}
{{- end -}}
